"""Defines the responses of the OpenAI API.

A field that is UNSET is omitted. A field that is None is sent as null, because clients expect some fields to be null.
"""

from typing import Any

from msgspec import UNSET, Struct, UnsetType

Unset = UnsetType


class CachedTokens(Struct, frozen=True):
    cached_tokens: int


class Usage(Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


def usage_of(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Usage:
    total = prompt_tokens + completion_tokens
    return Usage(prompt_tokens, completion_tokens, total, CachedTokens(cached_tokens))


class TopLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, frozen=True):
    content: list[TokenLogprob]
    refusal: None = None


class CalledFunction(Struct, frozen=True):
    name: str
    arguments: str


class ToolCall(Struct, frozen=True):
    """Describes a tool call. `index` is the number of the call in a stream; a complete message omits it."""

    id: str
    function: CalledFunction
    type: str = "function"
    index: int | Unset = UNSET


class ChatMessage(Struct, frozen=True):
    """Is the message of a complete response, or the delta of a streamed chunk."""

    role: str | Unset = UNSET
    content: str | None | Unset = UNSET
    tool_calls: list[ToolCall] | Unset = UNSET
    refusal: None | Unset = UNSET


class ChatChoice(Struct, frozen=True):
    index: int
    message: ChatMessage
    finish_reason: str
    logprobs: ChatLogprobs | None = None


class ChatCompletion(Struct, frozen=True):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str
    object: str = "chat.completion"


class ChunkChoice(Struct, frozen=True):
    index: int
    delta: ChatMessage
    finish_reason: str | None = None
    logprobs: ChatLogprobs | None = None


class ChatChunk(Struct, frozen=True):
    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    system_fingerprint: str
    usage: Usage | None | Unset = UNSET
    object: str = "chat.completion.chunk"


class TextLogprobs(Struct, frozen=True):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(Struct, frozen=True):
    index: int
    text: str
    finish_reason: str | None = None
    logprobs: TextLogprobs | None = None


class TextCompletion(Struct, frozen=True):
    """Is a complete response, or a chunk of a streamed one."""

    id: str
    created: int
    model: str
    choices: list[TextChoice]
    system_fingerprint: str
    usage: Usage | None | Unset = UNSET
    object: str = "text_completion"


class ModelCard(Struct, frozen=True):
    id: str
    created: int
    max_model_len: int | None
    root: str
    owned_by: str = "redline"
    object: str = "model"


class ModelList(Struct, frozen=True):
    data: list[ModelCard]
    object: str = "list"


class Embedding(Struct, frozen=True):
    index: int
    embedding: list[float] | str
    object: str = "embedding"


class EmbeddingList(Struct, frozen=True):
    data: list[Embedding]
    model: str
    usage: dict[str, Any]
    object: str = "list"

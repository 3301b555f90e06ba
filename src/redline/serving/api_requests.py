"""Defines the request bodies of the OpenAI API, with the additional fields of vLLM and of this server.

A field that is null is treated as absent.
"""

from typing import Any, Literal

from msgspec import Struct

JsonObject = dict[str, Any]
# The type of `prompt` and `input`: one text, a list of texts, one list of token ids, or a list of such lists.
Texts = str | list[str | int | list[int]]


class StreamOptions(Struct, frozen=True):
    include_usage: bool | None = None


class JsonSchema(Struct, frozen=True):
    name: str | None = None
    schema: JsonObject | bool | None = None
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(Struct, frozen=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Struct, frozen=True):
    """The value of vLLM's field `structured_outputs`. Exactly one of its fields must be set."""

    json: JsonObject | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class SamplingFields(Struct, frozen=True, kw_only=True):
    """Defines the fields that chat completions and text completions share."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    session_id: str | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonObject | str | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    guided_choice: list[str] | None = None


class ContentPart(Struct, frozen=True):
    type: str
    text: str | None = None
    refusal: str | None = None


class CalledFunction(Struct, frozen=True):
    name: str
    arguments: str = "{}"


class ToolCall(Struct, frozen=True):
    function: CalledFunction
    id: str | None = None
    type: str = "function"


class ChatMessage(Struct, frozen=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class Function(Struct, frozen=True):
    name: str
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class Tool(Struct, frozen=True):
    function: Function
    type: str = "function"


class NamedFunction(Struct, frozen=True):
    name: str


class NamedTool(Struct, frozen=True):
    function: NamedFunction
    type: str = "function"


class ChatRequest(SamplingFields, frozen=True, kw_only=True):
    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: JsonObject | None = None


class CompletionRequest(SamplingFields, frozen=True, kw_only=True):
    prompt: Texts
    logprobs: int | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    suffix: str | None = None
    best_of: int | None = None


class EmbeddingRequest(Struct, frozen=True, kw_only=True):
    input: Texts
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: str | None = None
    pooling: Literal["mean", "last"] | None = None


class TokenizeRequest(Struct, frozen=True, kw_only=True):
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    model: str | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: JsonObject | None = None


class DetokenizeRequest(Struct, frozen=True, kw_only=True):
    tokens: list[int]
    model: str | None = None


# Maps each field that this server does not support to its name in the error message. A request with such a field is
# refused, because ignoring the field would silently change the answer.
UNSUPPORTED = {
    "audio": "audio output",
    "functions": "functions (use tools)",
    "function_call": "function_call (use tool_choice)",
    "modalities": "modalities",
    "prediction": "predicted outputs",
    "web_search_options": "web search",
    "use_beam_search": "beam search",
    "prompt_logprobs": "log-probabilities of the prompt",
}

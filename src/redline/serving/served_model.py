"""Holds what the server needs of the model: its name, tokenizer, chat template, stop tokens and sampling defaults.

The weights are only in the engine process.
"""

import asyncio
import hashlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from redline.errors import ModelError, RedlineError
from redline.files.untrusted import read_json_object
from redline.generation.chat_prompt import ChatPrompt
from redline.generation.chat_template import ChatTemplate
from redline.generation.folder import ModelFolder, read_config
from redline.machine.version import VERSION
from redline.serving.api_requests import ChatMessage, Tool
from redline.serving.errors import ApiError, invalid
from redline.serving.sampling_fields import SamplingDefaults
from redline.serving.token_texts import TokenTexts

Value = TypeVar("Value")
# Shorter texts are encoded in the event loop, because passing them to a thread would take longer than encoding them.
_SHORT_CHARACTERS = 4096
_THREADS = 4


class ServedModel:
    """Encodes prompts for the engine, and decodes tokens.

    Long texts are encoded in threads, so that the event loop is not blocked: the tokenizer releases the global
    interpreter lock (GIL).
    """

    def __init__(self, folder: ModelFolder, name: str | None = None) -> None:
        self.path, self.tokenizer, self.tokens = folder.path, folder.tokenizer, folder.tokens
        self.name = name or folder.path.resolve().name
        self.created = int(time.time())
        self.stop_tokens = frozenset(folder.stop_tokens)
        self.texts = TokenTexts(folder.tokenizer)
        settings = folder.path / "generation_config.json"
        self.defaults = SamplingDefaults.of(
            read_json_object(settings, "model file", ModelError) if settings.exists() else {}
        )
        self.context = _context(read_config(folder.path))
        self.chat: ChatPrompt | None = None
        self._why_no_chat = ""
        try:
            self.chat = ChatPrompt(folder.tokenizer, ChatTemplate.read(folder.path))
        except ModelError as error:
            self._why_no_chat = str(error)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="redline-tokens")
        self.fingerprint = f"redline-{VERSION}"

    @classmethod
    def open(cls, path: str | Path, name: str | None = None) -> "ServedModel":
        return cls(ModelFolder.open(path), name)

    def set_plan(self, plan: str, context: int | None) -> None:
        """Sets the fingerprint from the plan of the loaded engine, and the context length if the engine has a limit."""
        digest = hashlib.sha256(f"{VERSION}|{plan}|{self.path.resolve()}".encode()).hexdigest()
        self.fingerprint = f"fp_{digest[:12]}"
        self.context = context or self.context

    @property
    def chat_prompt(self) -> ChatPrompt:
        if self.chat is None:
            raise invalid(f"This model cannot chat: {self._why_no_chat}", "messages")
        return self.chat

    @property
    def supports_tools(self) -> bool:
        return self.chat is not None and "tools" in self.chat.template.variables

    def check_name(self, name: str | None) -> None:
        if name is not None and name != self.name:
            message = f"The model {name[:200]!r} does not exist. This server has {self.name!r}."
            raise ApiError(404, message, param="model", code="model_not_found")

    async def encode(self, text: str, special_tokens: bool = True) -> list[int]:
        """Returns the tokens of a text. As in transformers, the text of a special token is encoded as that token."""
        work = partial(self.tokenizer.encode, text, add_special_tokens=special_tokens)
        tokens = (await self._run(work, len(text))).ids
        if not tokens:
            raise invalid("The prompt is empty.", "prompt")
        return tokens

    async def encode_chat(
        self, messages: list[ChatMessage], tools: list[Tool] | None, variables: dict[str, Any] | None
    ) -> list[int]:
        """Returns the tokens of the chat prompt, after which the model writes the next message."""
        prompt = self.chat_prompt
        given = [_plain_message(message) for message in messages]
        described = [msgspec.to_builtins(tool) for tool in tools or []] or None
        reserved = ("messages", "tools")
        extra = {name: value for name, value in (variables or {}).items() if name not in reserved}
        size = sum(len(message["content"] or "") for message in given) + (_SHORT_CHARACTERS if described else 0)
        try:
            return await self._run(partial(prompt.encode, given, described, **extra), size)
        except RedlineError as error:
            raise invalid(str(error), "messages") from error

    async def decode(self, tokens: list[int]) -> str:
        return await self._run(partial(self.tokenizer.decode, tokens, skip_special_tokens=False), len(tokens))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _run(self, work: Callable[[], Value], size: int) -> Value:
        if size < _SHORT_CHARACTERS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _plain_message(message: ChatMessage) -> dict[str, Any]:
    """Returns a message as chat templates expect it: with one text as content, and tool arguments as objects."""
    content = message.content
    if isinstance(content, list):
        for number, part in enumerate(content):
            if part.type not in ("text", "refusal"):
                raise invalid(f"This model takes text only, no {part.type!r}.", f"messages.content[{number}].type")
        content = "\n".join(part.text or part.refusal or "" for part in content)
    plain: dict[str, Any] = {"role": message.role, "content": content if content is not None else ""}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            plain[name] = value
    if message.tool_calls:
        plain["tool_calls"] = [
            {"type": "function", "id": call.id, "function": {"name": call.function.name, "arguments": _arguments(call)}}
            for call in message.tool_calls
        ]
    return plain


def _arguments(call: Any) -> Any:
    try:
        return msgspec.json.decode(call.function.arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        return call.function.arguments


def _context(config: dict[str, Any]) -> int | None:
    context = config.get("max_position_embeddings")
    return context if isinstance(context, int) and "memory" not in config else None

"""Builds the grammar of a required tool call, and finds the tool calls in a generated text.

If tool_choice is "required" or a named function, a grammar forces the text to be one call whose arguments match the
tool's JSON schema. If tool_choice is "auto", the model writes text and calls in the format of its chat template: JSON
between <tool_call> tags (Qwen, Hermes), or a text that is one JSON object with a name and arguments or parameters
(Llama 3).
"""

import json
import secrets
from dataclasses import dataclass
from typing import Any

import msgspec

from redline.generation.request import Grammar
from redline.serving.api_requests import ChatRequest, NamedTool, Tool
from redline.serving.api_responses import CalledFunction, ToolCall
from redline.serving.errors import invalid
from redline.serving.limits import Limits

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class ToolChoice:
    """Holds the tools of a request.

    The model must call one of the tools in `forced`; if `forced` is empty, the model decides whether to call a tool.
    `tagged` says that the chat template uses <tool_call> tags.
    """

    offered: tuple[Tool, ...] = ()
    forced: tuple[Tool, ...] = ()
    tagged: bool = False

    @classmethod
    def of(cls, body: ChatRequest, template: str, supported: bool, limits: Limits) -> "ToolChoice":
        choice = body.tool_choice or ("auto" if body.tools else "none")
        tools = tuple(body.tools or ())
        if len(tools) > limits.tools:
            raise invalid(f"tools takes at most {limits.tools} tools, not {len(tools)}.", "tools")
        if not tools and choice not in ("none", "auto"):
            raise invalid("tool_choice needs tools.", "tool_choice")
        if choice == "none" or not tools:
            return cls()
        if not supported:
            raise invalid("The chat template of this model does not support tools.", "tools", "unsupported_parameter")
        forced: tuple[Tool, ...] = ()
        if isinstance(choice, NamedTool):
            forced = tuple(tool for tool in tools if tool.function.name == choice.function.name)
            if not forced:
                raise invalid(f"tool_choice names {choice.function.name!r}, which is not in tools.", "tool_choice")
        elif choice == "required":
            forced = tools
        return cls(tools, forced, _OPEN in template)

    @property
    def grammar(self) -> Grammar | None:
        """The grammar of a forced call, or None if no call is forced."""
        if not self.forced:
            return None
        calls = [
            {
                "type": "object",
                "properties": {
                    "name": {"const": tool.function.name},
                    "arguments": tool.function.parameters or {"type": "object"},
                },
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for tool in self.forced
        ]
        # A reference such as #/$defs/NAME is resolved from the root of the schema, so the definitions are moved there.
        definitions: dict[str, Any] = {}
        for tool in self.forced:
            definitions |= (tool.function.parameters or {}).get("$defs", {})
        schema = calls[0] if len(calls) == 1 else {"anyOf": calls}
        return Grammar("json_schema", json.dumps(schema | ({"$defs": definitions} if definitions else {})))

    def reader(self) -> "ToolReader | None":
        """Returns a reader that finds the calls in one text, or None if no tool can be called."""
        if not self.offered:
            return None
        return ToolReader({tool.function.name for tool in self.offered}, bool(self.forced), self.tagged)


@dataclass
class ToolReader:
    """Separates the content of a text from its tool calls while the text is being generated."""

    names: set[str]
    forced: bool
    tagged: bool
    calls: int = 0
    _text: str = ""
    _in_call: bool = False
    _is_plain: bool = False

    def push(self, piece: str, is_last: bool) -> tuple[str, list[ToolCall]]:
        """Adds a piece, and returns the new content and the newly completed calls.

        Text that may become a call is held back.
        """
        self._text += piece
        return self._read_tags(is_last) if self.tagged and not self.forced else self._read_object(is_last)

    def _read_object(self, is_last: bool) -> tuple[str, list[ToolCall]]:
        """Reads a text that is either one call or only content."""
        if not self._is_plain and (self.forced or self._text.lstrip()[:1] in ("", "{")):
            if not is_last:
                return "", []
            if (call := self._call(self._text)) is not None:
                return "", [call]
        self._is_plain = True
        content, self._text = self._text, ""
        return content, []

    def _read_tags(self, is_last: bool) -> tuple[str, list[ToolCall]]:
        content, calls = "", list[ToolCall]()
        while True:
            if not self._in_call:
                before, found, rest = self._text.partition(_OPEN)
                held = 0 if found or is_last else _begun(before)
                content += before[: len(before) - held]
                self._text = rest if found else before[len(before) - held :]
                if not found:
                    break
                self._in_call = True
            inside, found, rest = self._text.partition(_CLOSE)
            if not found and not is_last:
                break
            if (call := self._call(inside)) is not None:
                calls.append(call)
            else:
                content += _OPEN + inside + found
            self._text, self._in_call = rest, False
        # White space around calls is not content.
        return ("" if self.calls and not content.strip() else content), calls

    def _call(self, text: str) -> ToolCall | None:
        try:
            found = msgspec.json.decode(text.strip())
        except (msgspec.DecodeError, RecursionError):
            return None
        if not isinstance(found, dict) or found.get("name") not in self.names:
            return None
        arguments = found.get("arguments", found.get("parameters", {}))
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        index, self.calls = self.calls, self.calls + 1
        return ToolCall(f"call_{secrets.token_hex(12)}", CalledFunction(found["name"], arguments), index=index)


def _begun(text: str) -> int:
    """Returns the number of characters at the end of a text that may be the beginning of an opening tag."""
    return next((size for size in range(len(_OPEN) - 1, 0, -1) if text.endswith(_OPEN[:size])), 0)

"""Turns chat messages into tokens, so that no text of a message ever becomes a special token.

A template writes special tokens such as <|im_end|> around the messages. If a message contained the text "<|im_end|>",
the tokenizer would encode this text as the special token, and a user could end their message and begin the assistant's.
Therefore a mark, which is a character that no message contains, is inserted into each such text. The rendered prompt is
split at the marks and the pieces are encoded separately, so that the text is encoded as ordinary characters. A prompt
whose messages contain no such text is encoded in one piece, exactly as transformers does.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from redline.errors import RedlineError
from redline.generation.chat_template import ChatTemplate

# The noncharacters U+FDD0 to U+FDEF. Unicode reserves them for a program's internal use, so texts rarely contain them.
_MARKS = tuple(map(chr, range(0xFDD0, 0xFDF0)))


class ChatPrompt:
    """Encodes messages for one model. `tokenizer` is a `tokenizers.Tokenizer`."""

    def __init__(self, tokenizer: Any, template: ChatTemplate) -> None:
        self._tokenizer, self.template = tokenizer, template
        added = tokenizer.get_added_tokens_decoder().values()
        special = [re.escape(token.content) for token in added if token.special and len(token.content) > 1]
        # The lookahead consumes only one character, so overlapping texts of special tokens are found too.
        self._special = re.compile(f"(?=(?:{'|'.join(special)}))(.)", re.DOTALL)
        self._has_special = bool(special)

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> list[int]:
        """Returns the tokens of the prompt that asks for the assistant's next message."""
        given: dict[str, Any] = {"messages": list(messages), "tools": tools and list(tools), **variables}
        mark = next((mark for mark in _MARKS if not _contains(given, mark)), None)
        if mark is None:
            raise RedlineError("the messages contain all noncharacters U+FDD0 to U+FDEF: remove one of them.")
        marked = self._mark(given, mark) if self._has_special else given
        text = self.template.render(**marked)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RedlineError("the messages are not UTF-8 text.") from error
        tokens: list[int] = []
        for piece in text.split(mark):
            tokens += self._tokenizer.encode(piece, add_special_tokens=False).ids
        if not tokens:
            raise RedlineError("the chat template renders these messages to an empty prompt.")
        return tokens

    def _mark(self, value: Any, mark: str) -> Any:
        """Returns a copy of a JSON value with a mark after the first character of each special token's text."""
        if isinstance(value, str):
            return self._special.sub(rf"\1{mark}", value)
        if isinstance(value, Mapping):
            return {self._mark(key, mark): self._mark(item, mark) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._mark(item, mark) for item in value]
        return value


def _contains(value: Any, mark: str) -> bool:
    if isinstance(value, str):
        return mark in value
    if isinstance(value, Mapping):
        return any(_contains(part, mark) for pair in value.items() for part in pair)
    if isinstance(value, (list, tuple)):
        return any(_contains(item, mark) for item in value)
    return False

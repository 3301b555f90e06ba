"""Tokens to text as they come: whole characters only, and spaces as the tokenizer would put them.

A token can be a part of a character's bytes, or bring a space that depends on the token before it. So a few tokens are
decoded together, and what is new against the last time is text; while it ends in half a character it waits.
"""

from collections.abc import Sequence
from typing import Any

_BROKEN = "\ufffd"
# More tokens than a character has bytes: what is still broken then stays so.
_LONGEST_WAIT = 8
_LOOK_BACK = 6


class TextStream:
    """`push` a token, print what it gives, and at the end what `finish` gives."""

    def __init__(self, tokenizer: Any, prompt: Sequence[int] = ()) -> None:
        """`tokenizer` is one of `tokenizers`; the text goes on from the prompt's."""
        self.tokenizer = tokenizer
        self.tokens = list(prompt[-_LOOK_BACK:])
        self.start, self.read = 0, len(self.tokens)

    def push(self, token: int) -> str:
        self.tokens.append(token)
        waited = len(self.tokens) - self.read
        before, text = self._texts()
        if text.endswith(_BROKEN) and waited < _LONGEST_WAIT:
            return ""
        self.start = len(self.tokens) if text.endswith(_BROKEN) else self.read
        self.read = len(self.tokens)
        return text[len(before) :]

    def finish(self) -> str:
        before, text = self._texts()
        self.start = self.read = len(self.tokens)
        return text[len(before) :]

    def _texts(self) -> tuple[str, str]:
        """What was given out of the tokens looked at, and all of their text."""
        return self._decode(self.tokens[self.start : self.read]), self._decode(self.tokens[self.start :])

    def _decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True) if tokens else ""

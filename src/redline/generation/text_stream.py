"""Tokens to text as they come: whole characters only, and spaces as the tokenizer would put them.

A token can be a part of a character's bytes, or bring a space that depends on the token before it. So a few tokens are
decoded together, and what is new against the last time is text; broken characters at its end wait, since the next token
may make them whole.
"""

from collections.abc import Sequence
from typing import Any

_BROKEN = "\ufffd"
# A character has at most four bytes: of those that can still become one, at most three are there.
_MOST_PENDING = 3
_LOOK_BACK = 6
# Tokens that are decoded together at most, where no text ends in a whole character.
_LONGEST = 64


class TextStream:
    """`push` a token, print what it gives, and at the end what `finish` gives."""

    def __init__(self, tokenizer: Any, prompt: Sequence[int] = ()) -> None:
        """`tokenizer` is one of `tokenizers`; the text goes on from the prompt's."""
        self.tokenizer = tokenizer
        self._look_at(list(prompt[-_LOOK_BACK:]))

    def push(self, token: int) -> str:
        tokens = [*self._tokens, token]
        text = self._decode(tokens)
        pending = _pending(text)
        new = text[self._given : len(text) - pending]
        if not pending:
            # The last ones stay, to be decoded with the next: the space between them depends on both.
            self._look_at(tokens[self._whole :])
        elif len(tokens) > _LONGEST:
            self._look_at(tokens[self._gap(tokens, text) :])
        else:
            self._tokens, self._given = tokens, max(self._given, len(text) - pending)
        return new

    def finish(self) -> str:
        new = self._decode(self._tokens)[self._given :]
        self._look_at([])
        return new

    def _look_at(self, tokens: list[int]) -> None:
        """Goes on from these, whose text has been given but for what is pending."""
        text = self._decode(tokens)
        pending = _pending(text)
        # How many tokens there were when the text last ended in a whole character, and how much of it was given.
        self._tokens, self._whole, self._given = tokens, 0 if pending else len(tokens), len(text) - pending

    def _gap(self, tokens: list[int], text: str) -> int:
        """A place among the last tokens that is not inside a character: of four neighbours, at least one is none."""
        last = len(tokens) - _MOST_PENDING - 1
        for place in range(last, last - _MOST_PENDING, -1):
            apart = self._decode(tokens[:place]) + self._decode(tokens[place:])
            if apart.replace(_BROKEN, "") == text.replace(_BROKEN, ""):
                return place
        return last - _MOST_PENDING

    def _decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True) if tokens else ""


def _pending(text: str) -> int:
    return min(_MOST_PENDING, len(text) - len(text.rstrip(_BROKEN)))

"""Detokenizes incrementally: returns only whole characters, with spaces where the tokenizer places them.

A token may contain only some bytes of a character, and whether its text begins with a space may depend on the token
before it. So the last few tokens are decoded together, and only the new part of their text is returned. An incomplete
character at the end is held back, because the next token may complete it.
"""

from collections.abc import Sequence
from typing import Any

_BROKEN = "\ufffd"
# A character has at most four bytes, so an incomplete one has at most three.
_MOST_PENDING = 3
_LOOK_BACK = 6
# The largest number of tokens that are decoded together while the last character is incomplete.
_LONGEST = 64


class TextStream:
    """Decodes tokens as they come: `push` returns the characters that a token completes; `finish` returns the rest."""

    def __init__(self, tokenizer: Any, prompt: Sequence[int] = ()) -> None:
        """`tokenizer` is a `tokenizers.Tokenizer`; `prompt` holds the tokens before the text that is streamed."""
        self.tokenizer = tokenizer
        self._restart(list(prompt[-_LOOK_BACK:]))

    def push(self, token: int) -> str:
        tokens = [*self._tokens, token]
        text = self._decode(tokens)
        pending = _pending(text)
        new = text[self._given : len(text) - pending]
        if not pending:
            # Keeps the last tokens, because the space before the next one depends on them.
            self._restart(tokens[self._whole :])
        elif len(tokens) > _LONGEST:
            self._restart(tokens[self._gap(tokens, text) :])
        else:
            self._tokens, self._given = tokens, max(self._given, len(text) - pending)
        return new

    def finish(self) -> str:
        new = self._decode(self._tokens)[self._given :]
        self._restart([])
        return new

    def _restart(self, tokens: list[int]) -> None:
        """Replaces the kept tokens by `tokens`. Their complete characters count as returned."""
        text = self._decode(tokens)
        pending = _pending(text)
        # `_whole` is the number of tokens whose text was complete at the restart; `_given` is the number of characters
        # of the text of `_tokens` that have been returned.
        self._tokens, self._whole, self._given = tokens, 0 if pending else len(tokens), len(text) - pending

    def _gap(self, tokens: list[int], text: str) -> int:
        """Returns the index of a token near the end that starts a character; one of four successive tokens does."""
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

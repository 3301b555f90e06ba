"""The interface between the chat and a model: streamed answers, with the speed at which they arrived."""

import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypedDict

from redline.chat.conversation import Message

# The reason of an ending if it is unknown which limit ended the answer, because servers report "length" in two cases:
# the answer has reached the requested maximum number of tokens, or the model's context is full.
LENGTH_OR_CONTEXT = "length or context"


class AnswerOptions(TypedDict, total=False):
    """Options of an answer; those that are left out have the defaults of the model or the server."""

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    seed: int


@dataclass
class Ending:
    """How an answer ended: its number of tokens (None if unknown), and the reason why it ended."""

    tokens: int | None = None
    reason: str = ""


class ChatModel(Protocol):
    @property
    def name(self) -> str: ...

    def answer(self, messages: Sequence[Message]) -> Generator[str, None, Ending]:
        """Yields the pieces of an answer. Closing the generator stops the work on it."""
        ...


class Answer:
    """An answer in progress: an iterator of pieces, with the text so far and the times of the pieces."""

    def __init__(self, pieces: Generator[str, None, Ending]) -> None:
        self.text = ""
        self.ending = Ending()
        self.first_s: float | None = None
        self.rest_s = 0.0
        self._pieces = pieces

    def __iter__(self) -> Iterator[str]:
        began = time.perf_counter()
        try:
            while True:
                try:
                    piece = next(self._pieces)
                except StopIteration as end:
                    self.ending = end.value or Ending()
                    return
                now = time.perf_counter() - began
                self.first_s = now if self.first_s is None else self.first_s
                self.rest_s = now - self.first_s
                self.text += piece
                yield piece
        finally:
            self._pieces.close()

    @property
    def tokens_per_s(self) -> float | None:
        """The speed after the first token."""
        if self.ending.tokens is None or self.ending.tokens < 2 or not self.rest_s:
            return None
        return (self.ending.tokens - 1) / self.rest_s

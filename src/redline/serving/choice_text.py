"""Builds the text of one choice: decodes its tokens, and ends the text at a stop string.

The log-probabilities of tokens are returned together with the text of these tokens.
"""

from dataclasses import dataclass, field
from typing import Any

from redline.generation.request import Finish, Output, TokenLogprobs
from redline.generation.text_stream import TextStream
from redline.serving.stop_strings import StopStrings

# Maps the reasons of the engine to the values of `finish_reason` in the API.
_REASONS = {Finish.STOP: "stop", Finish.LENGTH: "length", Finish.CONTEXT: "length", Finish.ABORTED: "abort"}


@dataclass(frozen=True)
class Piece:
    """Holds new text of a choice, and the log-probabilities of its tokens.

    `finish_reason` says why the text has ended; it is None if the text continues.
    """

    text: str
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None


class ChoiceText:
    """Turns the outputs of one request into pieces of text. `tokens` counts the generated tokens so far."""

    def __init__(self, tokenizer: Any, prompt: list[int], stops: tuple[str, ...]) -> None:
        self._stream, self._stops = TextStream(tokenizer, prompt), StopStrings(stops)
        self._logprobs: list[TokenLogprobs] = []
        self.tokens = self.cached_tokens = 0
        self.finish_reason: str | None = None

    def push(self, output: Output) -> Piece:
        """Returns the new text. After a stop string, `finish_reason` is set, and further outputs must not be pushed."""
        self.cached_tokens = max(self.cached_tokens, output.cached_tokens)
        text = ""
        for number, token in enumerate(output.tokens):
            self.tokens += 1
            if output.logprobs is not None:
                self._logprobs.append(output.logprobs[number])
            text += self._stops.push(self._stream.push(token))
            if self._stops.found is not None:
                return self._piece(text, "stop")
        if output.finish is None:
            return self._piece(text, None)
        text += self._stops.push(self._stream.finish())
        if self._stops.found is not None:
            return self._piece(text, "stop")
        return self._piece(text + self._stops.finish(), _REASONS[output.finish])

    def _piece(self, text: str, finish_reason: str | None) -> Piece:
        self.finish_reason = finish_reason
        if not text and finish_reason is None:
            # Keeps the log-probabilities until the text of their tokens is returned.
            return Piece("")
        logprobs, self._logprobs = self._logprobs, []
        return Piece(text, logprobs, finish_reason)

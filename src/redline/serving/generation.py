"""Generates the texts of one HTTP request: submits its choices to the engine, and turns outputs into pieces of text."""

import re
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from redline.generation.request import Grammar, Request, SamplingOptions
from redline.serving.admission import Ticket
from redline.serving.api_requests import SamplingFields
from redline.serving.api_responses import Usage, usage_of
from redline.serving.choice_text import ChoiceText, Piece
from redline.serving.errors import context_exceeded, invalid
from redline.serving.keys import Caller
from redline.serving.sampling_fields import choices_of, sampling_of, stops_of
from redline.serving.services import Services

# The largest number of new tokens if neither the request has max_tokens nor the model has a context limit.
_ENDLESS_TOKENS = 4096
SESSION = re.compile(r"[\w.:-]{1,128}", re.ASCII)


@dataclass(frozen=True)
class TextOptions:
    """Holds the options of a request that do not depend on its prompts."""

    sampling: SamplingOptions
    stops: tuple[str, ...]
    stop_tokens: frozenset[int]
    choices: int
    min_tokens: int
    logprobs: int | None
    grammar: Grammar | None
    session: str | None

    @classmethod
    def of(
        cls, services: Services, fields: SamplingFields, logprobs: int | None, grammar: Grammar | None
    ) -> "TextOptions":
        """Returns the options of a request. Raises an ApiError that names the field if one is invalid."""
        model, limits = services.model, services.limits
        model.check_name(fields.model)
        ended_by = frozenset() if fields.ignore_eos else model.stop_tokens
        extra = fields.stop_token_ids or []
        sampling = sampling_of(fields, model.defaults)
        check_tokens([*extra, *sampling.logit_bias], model.tokens, "stop_token_ids" if extra else "logit_bias")
        choices, session = choices_of(fields, limits), fields.session_id
        if session is not None and (choices > 1 or not SESSION.fullmatch(session)):
            message = "session_id takes up to 128 letters, digits and ._:-, and needs n = 1."
            raise invalid(message, "session_id")
        if (fields.min_tokens or 0) < 0:
            raise invalid(f"min_tokens must not be negative, not {fields.min_tokens}.", "min_tokens")
        return cls(
            sampling,
            stops_of(fields, limits),
            ended_by | frozenset(extra),
            choices,
            fields.min_tokens or 0,
            logprobs,
            grammar,
            session,
        )

    def requests(
        self, services: Services, request_id: str, caller: Caller, prompts: Sequence[list[int]], max_tokens: int | None
    ) -> list[Request]:
        """Returns an engine request for each choice of each prompt, in the order of their indices in the response."""
        made = []
        for prompt in prompts:
            limit = _limit(prompt, max_tokens, services.model.context)
            if self.min_tokens > limit:
                message = f"min_tokens ({self.min_tokens}) must not be larger than max_tokens ({limit})."
                raise invalid(message, "min_tokens")
            for choice in range(self.choices):
                made.append(
                    Request(
                        id=f"{request_id}-{len(made)}",
                        prompt=prompt,
                        max_tokens=limit,
                        sampling=replace(self.sampling, seed=self.sampling.seed + choice),
                        stop_tokens=self.stop_tokens,
                        min_tokens=self.min_tokens,
                        logprobs=self.logprobs,
                        grammar=self.grammar,
                        salt=caller.salt,
                        session=self.session,
                    )
                )
        return made


def check_tokens(tokens: Sequence[int], vocabulary: int, param: str) -> None:
    for token in tokens:
        if not 0 <= token < vocabulary:
            raise invalid(f"Token {token} is not in the model's vocabulary of {vocabulary}.", param)


def _limit(prompt: list[int], max_tokens: int | None, context: int | None) -> int:
    """Returns the largest number of new tokens. Raises an ApiError if max_tokens is invalid or exceeds the context."""
    if max_tokens is not None and max_tokens < 1:
        raise invalid(f"max_tokens must be at least 1, not {max_tokens}.", "max_tokens")
    if context is None:
        return min(max_tokens or _ENDLESS_TOKENS, 1 << 31)
    if len(prompt) + (max_tokens or 1) > context:
        raise context_exceeded(len(prompt), max_tokens or 1, context)
    return max_tokens or context - len(prompt)


# Yields lists of new pieces, each with the index of its choice.
Pieces = AsyncGenerator[list[tuple[int, Piece]], None]


class Generation:
    """Runs the engine requests of one HTTP request, and records their latencies and sizes as metrics."""

    def __init__(
        self, services: Services, ticket: Ticket, requests: list[Request], stops: tuple[str, ...], choices: int
    ) -> None:
        """`choices` is the number of consecutive requests that have the same prompt."""
        self._services, self._ticket, self._requests = services, ticket, requests
        self._choices_of_each = choices
        self._begun_s = time.perf_counter()
        self._places = {request.id: place for place, request in enumerate(requests)}
        self.choices = [ChoiceText(services.model.tokenizer, request.prompt, stops) for request in requests]

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens of all prompts. Each prompt is counted once, not once per choice."""
        return sum(len(request.prompt) for request in self._requests[:: self._choices_of_each])

    @property
    def usage(self) -> Usage:
        generated = sum(choice.tokens for choice in self.choices)
        # Only the first choice of each prompt counts: the others find the prompt in the cache because the first one
        # stored it there.
        cached = sum(choice.cached_tokens for choice in self.choices[:: self._choices_of_each])
        return usage_of(self.prompt_tokens, generated, cached)

    async def pieces(self) -> Pieces:
        """Yields lists of new pieces, each with the index of its choice, until all choices have ended.

        An empty list is a ping: nothing has arrived for some time. The caller must close the iterator, because this
        aborts the requests that have not ended.
        """
        metrics, engine = self._services.metrics, self._services.engine
        mailbox = engine.submit(self._requests)
        last_s: float | None = None
        try:
            running = len(self.choices)
            while running:
                pieces: dict[int, Piece] = {}
                taken = await mailbox.take()
                for output in taken:
                    place = self._places[output.id]
                    choice = self.choices[place]
                    if choice.finish_reason is not None:
                        continue
                    piece = choice.push(output)
                    pieces[place] = _joined(pieces[place], piece) if place in pieces else piece
                    if piece.finish_reason is not None:
                        running -= 1
                        # If a stop string has ended the text, the engine would still continue it.
                        engine.end(output.id)
                        metrics.finished(piece.finish_reason)
                if pieces:
                    now_s = time.perf_counter()
                    if last_s is None:
                        self._ticket.first_token()
                        metrics.first_token_s.observe(now_s - self._begun_s)
                    else:
                        metrics.between_tokens_s.observe(now_s - last_s)
                    last_s = now_s
                shown = [(place, piece) for place, piece in pieces.items() if piece.text or piece.finish_reason]
                if shown or not taken:
                    yield shown
            metrics.end_to_end_s.observe(time.perf_counter() - self._begun_s)
        finally:
            engine.release(mailbox)
            metrics.prompt_size.observe(self.prompt_tokens)
            metrics.generation_size.observe(sum(choice.tokens for choice in self.choices))


def _joined(first: Piece, second: Piece) -> Piece:
    return Piece(first.text + second.text, first.logprobs + second.logprobs, second.finish_reason)

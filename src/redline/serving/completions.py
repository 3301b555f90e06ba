"""Answers POST /v1/completions."""

import secrets
import time
from contextlib import aclosing
from typing import Any

import msgspec
from aiohttp import web
from msgspec import UNSET

from redline.serving.api_requests import CompletionRequest, Texts
from redline.serving.api_responses import TextChoice, TextCompletion
from redline.serving.choice_text import Piece
from redline.serving.echo import Echo, read_echoes
from redline.serving.errors import ApiError, invalid
from redline.serving.generation import Generation, Pieces, TextOptions, check_tokens
from redline.serving.logprobs import joined_logprobs, text_logprobs
from redline.serving.sampling_fields import check_logprobs
from redline.serving.served_model import ServedModel
from redline.serving.services import CALL, SERVICES, Services
from redline.serving.sse import EventStream
from redline.serving.structured_output import grammar_of

# The default of `max_tokens` in the OpenAI API.
_MAX_TOKENS = 16


async def completions(request: web.Request) -> web.StreamResponse:
    services = request.app[SERVICES]
    body = services.reader.read(request[CALL].body, CompletionRequest)
    return await _Completion(services, body).answer(request)


def split_texts(given: Texts, param: str, most: int) -> list[str] | list[list[int]]:
    """Returns a list of the texts, or of the lists of token ids, of a field that holds one or several of them.

    Raises an ApiError if the field holds none, both kinds, or more than `most`.
    """
    if isinstance(given, str):
        return [given]
    items: list[Any] = [given] if given and all(isinstance(item, int) for item in given) else given
    kinds = {type(item) for item in items}
    if len(kinds) != 1 or not kinds <= {str, list}:
        raise invalid(f"{param} must be a text, a list of texts, or token ids, and not empty.", param)
    if len(items) > most:
        raise invalid(f"{param} takes at most {most} texts, not {len(items)}.", param)
    return items


async def encode_texts(
    model: ServedModel, texts: list[str] | list[list[int]], param: str, special_tokens: bool = True
) -> list[list[int]]:
    """Returns the tokens of each text. With `special_tokens`, the tokenizer adds those that the model expects."""
    encoded = []
    for text in texts:
        if isinstance(text, str):
            encoded.append(await model.encode(text, special_tokens))
            continue
        if not text:
            raise invalid(f"{param} must not be empty.", param)
        check_tokens(text, model.tokens, param)
        encoded.append(text)
    return encoded


class _Completion:
    """Answers one request for text completions."""

    def __init__(self, services: Services, body: CompletionRequest) -> None:
        self._services, self._body = services, body
        self._id, self._created = f"cmpl-{secrets.token_hex(16)}", int(time.time())
        if body.suffix:
            raise invalid("This server does not support suffix.", "suffix", "unsupported_parameter")
        if body.best_of is not None and body.best_of != (body.n or 1):
            raise invalid("best_of must equal n.", "best_of", "unsupported_parameter")
        logprobs = None if body.logprobs is None else check_logprobs(body.logprobs, "logprobs")
        self._options = TextOptions.of(services, body, logprobs, grammar_of(body, services.limits))
        self._texts = split_texts(body.prompt, "prompt", services.limits.choices)
        if len(self._texts) * self._options.choices > services.limits.choices:
            raise invalid(f"prompts times n must be at most {services.limits.choices}.", "n")
        count = len(self._texts) * self._options.choices
        self._offsets = [0] * count
        # The prompt that the next piece of each choice starts with; empty after the first piece, or without `echo`.
        self._echoes = [Echo()] * count

    async def answer(self, request: web.Request) -> web.StreamResponse:
        services, options, caller = self._services, self._options, request[CALL].caller
        ticket = services.admit(caller, len(self._texts) * options.choices)
        try:
            begun_s = time.perf_counter()
            special = self._body.add_special_tokens is not False
            prompts = await encode_texts(services.model, self._texts, "prompt", special)
            limit = _MAX_TOKENS if self._body.max_tokens is None else self._body.max_tokens
            requests = options.requests(services, self._id, caller, prompts, limit)
            ticket.queue(sum(map(len, prompts)))
            services.metrics.queue_s.observe(time.perf_counter() - begun_s)
            generation = Generation(services, ticket, requests, options.stops, options.choices)
            if self._body.echo:
                echoes = await read_echoes(services, self._texts, prompts, options.logprobs)
                self._echoes = [echo for echo in echoes for _ in range(options.choices)]
                self._offsets = [len(echo.text) for echo in self._echoes]
            async with aclosing(generation.pieces()) as pieces:
                if self._body.stream:
                    return await self._stream(request, generation, pieces)
                return await self._whole(generation, pieces)
        finally:
            ticket.close()

    async def _whole(self, generation: Generation, pieces: Pieces) -> web.StreamResponse:
        found: list[list[Piece]] = [[] for _ in generation.choices]
        async for new in pieces:
            for index, piece in new:
                found[index].append(piece)
        choices = []
        for index, parts in enumerate(found):
            logprobs = [entry for part in parts for entry in part.logprobs]
            text = "".join(part.text for part in parts)
            choices.append(self._choice(index, Piece(text, logprobs, parts[-1].finish_reason)))
        completion = self._completion(choices, generation)
        return web.Response(body=msgspec.json.encode(completion), content_type="application/json")

    async def _stream(
        self,
        request: web.Request,
        generation: Generation,
        pieces: Pieces,
    ) -> web.StreamResponse:
        stream = EventStream(request, self._services.limits.stall_s)
        try:
            async for new in pieces:
                chunks = [self._completion([self._choice(index, piece)]) for index, piece in new]
                await (stream.send(*chunks) if chunks else stream.ping())
            if self._has_usage:
                await stream.send(self._completion([], generation))
            await stream.finish()
        except ApiError as error:
            if not stream.is_open:
                raise
            await stream.fail(error)
        return stream.response

    def _choice(self, index: int, piece: Piece) -> TextChoice:
        echo, self._echoes[index] = self._echoes[index], Echo()
        logprobs = None
        if self._options.logprobs is not None:
            logprobs = text_logprobs(piece.logprobs, self._services.model.texts, self._offsets[index])
            self._offsets[index] += len(piece.text)
            if echo.logprobs is not None:
                logprobs = joined_logprobs(echo.logprobs, logprobs)
        return TextChoice(index, echo.text + piece.text, piece.finish_reason, logprobs)

    @property
    def _has_usage(self) -> bool:
        return bool(self._body.stream_options and self._body.stream_options.include_usage)

    def _completion(self, choices: list[TextChoice], ended: Generation | None = None) -> TextCompletion:
        if self._body.stream and ended is None:
            usage = None if self._has_usage else UNSET
        else:
            usage = UNSET if ended is None else ended.usage
        model = self._services.model
        return TextCompletion(self._id, self._created, model.name, choices, model.fingerprint, usage)

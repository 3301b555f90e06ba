"""Answers POST /v1/chat/completions."""

import secrets
import time
from contextlib import aclosing

import msgspec
from aiohttp import web
from msgspec import UNSET

from redline.serving.api_requests import ChatRequest
from redline.serving.api_responses import (
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatLogprobs,
    ChatMessage,
    ChunkChoice,
    ToolCall,
)
from redline.serving.choice_text import Piece
from redline.serving.errors import ApiError, invalid
from redline.serving.generation import Generation, Pieces, TextOptions
from redline.serving.logprobs import chat_logprobs
from redline.serving.sampling_fields import check_logprobs
from redline.serving.services import CALL, SERVICES, Services
from redline.serving.sse import EventStream
from redline.serving.structured_output import grammar_of
from redline.serving.tools import ToolChoice


async def chat_completions(request: web.Request) -> web.StreamResponse:
    services = request.app[SERVICES]
    body = services.reader.read(request[CALL].body, ChatRequest)
    return await _Chat(services, body).answer(request)


class _Chat:
    """Answers one request for chat completions."""

    def __init__(self, services: Services, body: ChatRequest) -> None:
        self._services, self._body = services, body
        self._id, self._created = f"chatcmpl-{secrets.token_hex(16)}", int(time.time())
        prompt = services.model.chat_prompt
        self._tools = ToolChoice.of(body, prompt.template.source, services.model.supports_tools, services.limits)
        grammar = grammar_of(body, services.limits)
        if grammar is not None and self._tools.grammar is not None:
            raise invalid("A required tool call cannot be combined with another grammar.", "tool_choice")
        self._options = TextOptions.of(services, body, self._logprobs, grammar or self._tools.grammar)
        self._readers = [self._tools.reader() for _ in range(self._options.choices)]

    @property
    def _logprobs(self) -> int | None:
        body = self._body
        if body.top_logprobs and not body.logprobs:
            raise invalid("top_logprobs needs logprobs = true.", "top_logprobs")
        return check_logprobs(body.top_logprobs or 0, "top_logprobs") if body.logprobs else None

    async def answer(self, request: web.Request) -> web.StreamResponse:
        services, body, caller = self._services, self._body, request[CALL].caller
        ticket = services.admit(caller, self._options.choices)
        try:
            begun_s = time.perf_counter()
            tools = list(self._tools.offered)
            prompt = await services.model.encode_chat(body.messages, tools, body.chat_template_kwargs)
            limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
            requests = self._options.requests(services, self._id, caller, [prompt], limit)
            ticket.queue(len(prompt))
            services.metrics.queue_s.observe(time.perf_counter() - begun_s)
            generation = Generation(services, ticket, requests, self._options.stops, self._options.choices)
            async with aclosing(generation.pieces()) as pieces:
                if body.stream:
                    return await self._stream(request, generation, pieces)
                return await self._whole(generation, pieces)
        finally:
            ticket.close()

    async def _whole(self, generation: Generation, pieces: Pieces) -> web.StreamResponse:
        found: list[list[Piece]] = [[] for _ in generation.choices]
        async for new in pieces:
            for index, piece in new:
                found[index].append(piece)
        choices = [self._choice(index, parts) for index, parts in enumerate(found)]
        model = self._services.model
        completion = ChatCompletion(self._id, self._created, model.name, choices, generation.usage, model.fingerprint)
        return web.Response(body=msgspec.json.encode(completion), content_type="application/json")

    def _choice(self, index: int, pieces: list[Piece]) -> ChatChoice:
        content, calls = "", list[ToolCall]()
        for piece in pieces:
            text, new = self._split(index, piece)
            content, calls = content + text, calls + new
        logprobs = None
        if self._options.logprobs is not None:
            entries = [entry for piece in pieces for entry in piece.logprobs]
            logprobs = chat_logprobs(entries, self._services.model.texts)
        complete = [ToolCall(call.id, call.function) for call in calls]
        message = ChatMessage("assistant", content or None if calls else content, complete or UNSET, None)
        return ChatChoice(index, message, _reason(pieces[-1], bool(calls)), logprobs)

    async def _stream(self, request: web.Request, generation: Generation, pieces: Pieces) -> web.StreamResponse:
        stream = EventStream(request, self._services.limits.stall_s)
        begun = [False] * len(generation.choices)
        try:
            async for new in pieces:
                chunks = [chunk for index, piece in new for chunk in self._chunks(index, piece, begun)]
                if chunks:
                    await stream.send(*chunks)
                elif not new:
                    await stream.ping()
            if self._has_usage:
                await stream.send(self._chunk([], generation))
            await stream.finish()
        except ApiError as error:
            if not stream.is_open:
                raise
            await stream.fail(error)
        return stream.response

    def _chunks(self, index: int, piece: Piece, begun: list[bool]) -> list[ChatChunk]:
        """Returns the chunks of a piece, in this order: role, content, tool calls, finish reason.

        Only the first piece of a choice has a role, and only the last one has a finish reason.
        """
        chunks = []
        if not begun[index]:
            begun[index] = True
            chunks.append(ChunkChoice(index, ChatMessage("assistant", "")))
        content, calls = self._split(index, piece)
        logprobs: ChatLogprobs | None = None
        if self._options.logprobs is not None and piece.logprobs:
            logprobs = chat_logprobs(piece.logprobs, self._services.model.texts)
        if content or logprobs is not None:
            chunks.append(ChunkChoice(index, ChatMessage(content=content), logprobs=logprobs))
        if calls:
            chunks.append(ChunkChoice(index, ChatMessage(tool_calls=calls)))
        if piece.finish_reason is not None:
            reader = self._readers[index]
            reason = _reason(piece, reader is not None and reader.calls > 0)
            chunks.append(ChunkChoice(index, ChatMessage(), reason))
        return [self._chunk([chunk]) for chunk in chunks]

    def _split(self, index: int, piece: Piece) -> tuple[str, list[ToolCall]]:
        """Returns the content and the tool calls of a piece."""
        reader = self._readers[index]
        return (piece.text, []) if reader is None else reader.push(piece.text, piece.finish_reason is not None)

    @property
    def _has_usage(self) -> bool:
        return bool(self._body.stream_options and self._body.stream_options.include_usage)

    def _chunk(self, choices: list[ChunkChoice], ended: Generation | None = None) -> ChatChunk:
        """Returns a chunk. `ended` is given only for the last chunk, which contains the usage."""
        usage = UNSET if not self._has_usage else None if ended is None else ended.usage
        model = self._services.model
        return ChatChunk(self._id, self._created, model.name, choices, model.fingerprint, usage)


def _reason(piece: Piece, has_calls: bool) -> str:
    return "tool_calls" if has_calls and piece.finish_reason == "stop" else piece.finish_reason or "stop"

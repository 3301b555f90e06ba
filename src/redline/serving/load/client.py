"""Sends one streaming request to an OpenAI-compatible server and records when each chunk arrived."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import ClientError, ClientPayloadError, ClientResponse, ClientSession, ClientTimeout, TCPConnector

from redline.errors import first_line
from redline.serving.load.outcome import Outcome, Status
from redline.web.event_stream import Event, EventParser

_BUSY = (429, 503)
_LONGEST_ERROR_BYTES = 4096


@dataclass(frozen=True)
class Target:
    """A server, and what every request has in common. `url` ends before /v1; `extra` is added to every body."""

    url: str
    model: str
    endpoint: str = "auto"
    key: str | None = field(default=None, repr=False)
    extra: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float = 600.0

    def request(self, prompt: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """Returns the URL and the body for a prompt; a text prompt can be sent to the chat endpoint as a message."""
        body = {"model": self.model, **self.extra, **prompt, "stream": True}
        body["stream_options"] = {"include_usage": True}
        if self.endpoint == "chat" and isinstance(body.get("prompt"), str):
            body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
        path = "chat/completions" if "messages" in body else "completions"
        return f"{self.url}/v1/{path}", body

    def session(self) -> ClientSession:
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        # The generator, not the connector, decides how many requests are sent at the same time.
        return ClientSession(connector=TCPConnector(limit=0), timeout=ClientTimeout(total=None), headers=headers)


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Any = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None

    @property
    def has_text(self) -> bool:
        if self.delta is None:
            return bool(self.text)
        return bool(self.delta.content or self.delta.reasoning_content or self.delta.reasoning or self.delta.tool_calls)


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = msgspec.field(default_factory=list)
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


class _Failed(Exception):
    """The server reported an error, or its answer is not a whole stream."""


async def send(
    session: ClientSession,
    target: Target,
    number: int,
    prompt: Mapping[str, Any],
    due_s: float,
    abandon_after: int | None = None,
) -> Outcome:
    """Sends the request and reads its answer to the end, or leaves after `abandon_after` chunks.

    Times are those of the event loop's clock.
    """
    now_s = asyncio.get_running_loop().time
    answer = _Answer()
    status, error = Status.DONE, ""
    url, body = target.request(prompt)
    sent_s = now_s()
    try:
        async with asyncio.timeout(target.timeout_s), session.post(url, json=body) as response:
            answer.http_status = response.status
            if response.status != 200:
                status = Status.REJECTED if response.status in _BUSY else Status.FAILED
                error = await _read_error(response)
            elif not await answer.read(response, now_s, abandon_after):
                status = Status.ABANDONED
    except TimeoutError:
        status, error = Status.FAILED, f"no answer within {target.timeout_s:g} s"
    except ClientPayloadError:
        status, error = Status.FAILED, "the connection was lost in the middle of the answer"
    except (ClientError, OSError, _Failed, ValueError) as problem:
        status, error = Status.FAILED, first_line(problem)
    return Outcome(
        number=number,
        status=status,
        due_s=due_s,
        sent_s=sent_s,
        ended_s=answer.done_s if answer.done_s is not None and status is Status.DONE else now_s(),
        first_s=answer.times_s[0] if answer.times_s else None,
        last_s=answer.times_s[-1] if answer.times_s else None,
        gaps_s=tuple(after - before for before, after in zip(answer.times_s, answer.times_s[1:], strict=False)),
        prompt_tokens=answer.usage.prompt_tokens,
        output_tokens=answer.usage.completion_tokens,
        cached_tokens=(answer.usage.prompt_tokens_details or _Details()).cached_tokens or 0,
        finish=answer.finish,
        http_status=answer.http_status,
        error=error,
    )


class _Answer:
    """The chunks of an answer that have arrived. `times_s` has the time of each chunk with text."""

    def __init__(self) -> None:
        self.times_s: list[float] = []
        self.done_s: float | None = None
        self.usage = _Usage()
        self.finish = ""
        self.http_status: int | None = None

    async def read(self, response: ClientResponse, now_s: Any, abandon_after: int | None) -> bool:
        """Returns whether the whole answer was read; raises if it ends too early."""
        parser = EventParser()
        async for data in response.content.iter_any():
            arrived_s = now_s()
            for event in parser.push(data):
                self._take(event, arrived_s)
            if abandon_after is not None and len(self.times_s) >= abandon_after:
                response.close()
                return False
        # Some servers end the response without [DONE].
        if self.done_s is None and not self.finish:
            raise _Failed("the stream ended before the answer did")
        return True

    def _take(self, event: Event, arrived_s: float) -> None:
        if event.data == b"[DONE]":
            self.done_s = arrived_s
            return
        try:
            chunk = _decode(event.data)
        except msgspec.DecodeError as problem:
            raise _Failed(f"a chunk is not valid: {problem}") from problem
        if event.name == "error" or chunk.error is not None:
            raise _Failed(_message(event.data))
        if chunk.usage is not None:
            self.usage = chunk.usage
        if any(choice.has_text for choice in chunk.choices):
            self.times_s.append(arrived_s)
        for choice in chunk.choices:
            self.finish = choice.finish_reason or self.finish


async def _read_error(response: ClientResponse) -> str:
    text = await response.content.read(_LONGEST_ERROR_BYTES)
    return f"{response.status} {_message(text)}".strip()


def _message(data: bytes) -> str:
    """Returns the message of an error in OpenAI's form, or the start of the text."""
    try:
        found = msgspec.json.decode(data)
        error = found.get("error", found)
        return str(error["message"] if isinstance(error, dict) else error)[:300]
    except (msgspec.DecodeError, KeyError, AttributeError, UnicodeDecodeError):
        return data[:300].decode("utf-8", "replace")

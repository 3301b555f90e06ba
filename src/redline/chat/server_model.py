"""A model of an OpenAI-compatible server."""

import http.client
import json
import socket
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from textwrap import shorten
from typing import Any
from urllib.parse import urlsplit

from redline.chat.conversation import Message
from redline.chat.model import LENGTH_OR_CONTEXT, AnswerOptions, Ending
from redline.errors import RedlineError
from redline.notation import parse_server_url
from redline.web.event_stream import Event, EventParser

# A long prompt may take minutes until its first token.
_TIMEOUT_S = 600.0
_CONNECT_TIMEOUT_S = 10.0
_READ_BYTES, _LONGEST_BYTES = 65_536, 64 << 20
_LONGEST_LIST = 1000


class _NotThere(RedlineError):
    """The server does not have this path."""


class ServerModel:
    """A model of a server by its name. Without a name, uses the first model that the server lists.

    Raises RedlineError if the server lists models, but none of this name.
    """

    def __init__(self, url: str, name: str | None, options: AnswerOptions, key: str | None) -> None:
        self.url = parse_server_url(url)
        self._key, self._options = key, options
        self.name = self._find_model(name)

    def answer(self, messages: Sequence[Message]) -> Generator[str, None, Ending]:
        body = {"model": self.name, "messages": list(messages), "stream": True, **self._options}
        body["stream_options"] = {"include_usage": True}
        with closing(self._connect()) as connection:
            response = self._request(connection, "POST", "/v1/chat/completions", json.dumps(body))
            if response.headers.get_content_type() == "application/json":
                # A server that cannot stream sends the whole answer.
                choice = _first(_parse(self._read(response)).get("choices"))
                yield str(_get(choice, "message", "content") or "")
                ending = Ending(reason=str(choice.get("finish_reason") or ""))
            else:
                ending = yield from self._read_pieces(response)
        if ending.reason == "length" and not self._is_longest(ending.tokens):
            ending.reason = LENGTH_OR_CONTEXT
        return ending

    def _is_longest(self, tokens: int | None) -> bool:
        most = self._options.get("max_tokens")
        return most is not None and tokens is not None and tokens >= most

    def _read_pieces(self, response: http.client.HTTPResponse) -> Generator[str, None, Ending]:
        parser, ending = EventParser(), Ending()
        while True:
            try:
                data = response.read1(_READ_BYTES)
                events = parser.push(data)
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise self._lost() from error
            for event in events:
                if event.data == b"[DONE]":
                    return ending
                chunk = _chunk(event)
                choice = _first(chunk.get("choices"))
                ending.reason = str(choice.get("finish_reason") or ending.reason)
                tokens = _get(chunk, "usage", "completion_tokens")
                ending.tokens = tokens if isinstance(tokens, int) else ending.tokens
                if piece := _get(choice, "delta", "content"):
                    yield str(piece)
            if not data:
                if not ending.reason:
                    raise self._lost()
                return ending

    def _lost(self) -> RedlineError:
        return RedlineError(f"the connection to {self.url} was lost before the answer was complete.")

    def _find_model(self, name: str | None) -> str:
        try:
            with closing(self._connect()) as connection:
                listed = _parse(self._read(self._request(connection, "GET", "/v1/models"))).get("data")
        except _NotThere:
            if name is None:
                raise
            return name
        entries = listed if isinstance(listed, list) else []
        names = [found for entry in entries if isinstance(found := _get(entry, "id"), str)]
        if name is not None:
            if names and name not in names:
                listing = shorten(", ".join(map(repr, names)), _LONGEST_LIST)
                raise RedlineError(
                    f"{self.url} has no model {name!r}: it lists {listing}. A question needs a model or - before it, "
                    'as in: redline chat --server URL - "QUESTION".'
                )
            return name
        if not names:
            raise RedlineError(f"{self.url} lists no model: give its name as MODEL.")
        return names[0]

    def _connect(self) -> http.client.HTTPConnection:
        parts = urlsplit(self.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=_CONNECT_TIMEOUT_S)
        try:
            connection.connect()
        except OSError as error:
            reason = error.strerror if not isinstance(error, socket.gaierror) else "unknown host name"
            raise RedlineError(f"cannot reach {self.url}: {(reason or str(error)).lower().rstrip('.')}.") from error
        connection.sock.settimeout(_TIMEOUT_S)
        return connection

    def _request(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: str | None = None
    ) -> http.client.HTTPResponse:
        headers = {"Content-Type": "application/json"} if body is not None else {}
        headers |= {"Authorization": f"Bearer {self._key}"} if self._key else {}
        try:
            connection.request(method, urlsplit(self.url).path + path, body and body.encode(), headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise RedlineError(
                f"{self.url} does not answer: {str(error).rstrip('.') or type(error).__name__}."
            ) from error
        if response.status != 200:
            raise (_NotThere if response.status in (404, 405, 501) else RedlineError)(self._problem(response))
        return response

    def _problem(self, response: http.client.HTTPResponse) -> str:
        status, said = response.status, _message(self._read(response))
        if status in (401, 403):
            return f"{self.url} refuses the API key ({status}): give it in REDLINE_API_KEY or --api-key-file."
        if status in (429, 503):
            state = "is busy" if status == 429 else "is not ready"
            wait = response.headers.get("Retry-After") or ""
            again = f"try again in {wait} s" if wait.isdigit() else "try again in a moment"
            return f"{self.url} {state} ({status}{f': {said}' if said else ''}): {again}."
        return f"{self.url} answers {status}{f': {said}' if said else ''}."

    def _read(self, response: http.client.HTTPResponse) -> bytes:
        try:
            return response.read(_LONGEST_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise self._lost() from error


def _parse(data: bytes) -> Mapping[str, Any]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise RedlineError("the server does not answer with JSON: is it OpenAI-compatible?")
    return found


def _chunk(event: Event) -> Mapping[str, Any]:
    chunk = _parse(event.data)
    if event.name == "error" or chunk.get("error"):
        raise RedlineError(f"the server reports an error: {_message(event.data) or 'unknown'}.")
    return chunk


def _message(data: bytes) -> str:
    """Returns the message of an error in OpenAI's form, without a full stop; empty if it has none."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return ""
    error = found.get("error", found) if isinstance(found, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return " ".join(message.split())[:300].rstrip(".") if isinstance(message, str) else ""


def _first(entries: Any) -> Mapping[str, Any]:
    return entries[0] if isinstance(entries, list) and entries and isinstance(entries[0], dict) else {}


def _get(entry: Any, *names: str) -> Any:
    found: Any = entry
    for name in names:
        found = found.get(name) if isinstance(found, Mapping) else None
    return found

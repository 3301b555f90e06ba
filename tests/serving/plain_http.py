"""Requests without a client library, so that tests see every byte."""

import http.client
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

PATIENCE_S = 30.0


class Answer:
    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status, self.headers, self.body = status, headers, body

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str | None:
        return self.json["error"]["code"]


def send(url: str, body: Any = None, headers: dict[str, str] | None = None, method: str | None = None) -> Answer:
    """Sends a JSON body (bytes are sent as they are) by POST; without a body, sends a GET."""
    with opened(url, body, headers, method) as response:
        found = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, found, response.read())


@contextmanager
def opened(
    url: str, body: Any = None, headers: dict[str, str] | None = None, method: str | None = None
) -> Iterator[http.client.HTTPResponse]:
    """Yields the response before its body is read; closes the connection at the end."""
    place = urlsplit(url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=PATIENCE_S)
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    given = {"Content-Type": "application/json"} if data is not None else {}
    try:
        connection.request(method or ("GET" if data is None else "POST"), place.path, data, given | (headers or {}))
        yield connection.getresponse()
    finally:
        connection.close()


def send_raw(url: str, data: bytes, timeout_s: float = PATIENCE_S) -> bytes:
    """Sends bytes and returns what the server answers, at least its first line, or nothing if it closes first."""
    place = urlsplit(url)
    with socket.create_connection((place.hostname or "", place.port or 0), timeout_s) as connection:
        received = b""
        try:
            connection.sendall(data)
            while b"\r\n\r\n" not in received and (part := connection.recv(65_536)):
                received += part
        except ConnectionError:
            pass
        return received

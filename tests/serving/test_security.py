"""Access, limits of what a request may contain, and malformed requests of every kind."""

import json
import random
import socket
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from redline.errors import RedlineError
from redline.serving.server import EngineSource, Server
from serving.conftest import make_server
from serving.plain_http import PATIENCE_S, send, send_raw

KEYS = {"alice": "the-key-of-alice", "bob": "the-key-of-bob"}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SAY = {"prompt": "[[say ab]]"}


@pytest.fixture(scope="module")
def locked(folder: Path) -> Iterator[Server]:
    with make_server(folder, KEYS, body_bytes=20_000) as running:
        yield running


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize("headers", [{}, bearer("wrong-wrong-wrong"), bearer(""), {"Authorization": "Basic abc"}])
@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/version", TEXT, "/tokenize"])
def test_everything_but_health_needs_a_key(locked: Server, path: str, headers: dict[str, str]) -> None:
    answer = send(f"{locked.url}{path}", SAY if path in (TEXT, "/tokenize") else None, headers)
    assert (answer.status, answer.code) == (401, "invalid_api_key")
    assert answer.headers["connection"] == "close"
    assert send(f"{locked.url}/health").status == 200


def test_each_key_is_accepted_and_shares_no_cache(locked: Server) -> None:
    cached = []
    for name in ("alice", "alice", "bob"):
        answer = send(f"{locked.url}{TEXT}", SAY, bearer(KEYS[name]))
        cached.append(answer.json["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, len(SAY["prompt"]) - 1, 0]


def test_other_machines_need_a_key(folder: Path) -> None:
    with pytest.raises(RedlineError, match="can be reached from other machines: give an --api-key"):
        Server(folder, EngineSource("none:none"), host="0.0.0.0", port=0)


def test_web_sites_cannot_use_a_server_without_a_key(server: Server) -> None:
    for headers in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}, {"Origin": "null"}):
        answer = send(f"{server.url}{TEXT}", SAY, headers)
        assert answer.status == 403 and "access-control-allow-origin" not in answer.headers
    # A form of a web site can send text/plain without asking the server first.
    assert send(f"{server.url}{TEXT}", SAY, {"Content-Type": "text/plain"}).status == 415
    answer = send(f"{server.url}{TEXT}", headers={"Origin": server.url}, method="OPTIONS")
    assert answer.status == 405 and "access-control-allow-origin" not in answer.headers
    assert send(f"{server.url}{TEXT}", SAY, {"Origin": server.url}).status == 200


def test_large_bodies_are_refused(locked: Server) -> None:
    key = bearer(KEYS["alice"])
    answer = send(f"{locked.url}{TEXT}", {"prompt": "x" * 30_000}, key)
    assert (answer.status, answer.code) == (413, "body_too_large")
    with socket.create_connection(("127.0.0.1", locked.port), PATIENCE_S) as connection:
        head = f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += f"Authorization: Bearer {KEYS['alice']}\r\nTransfer-Encoding: chunked\r\n\r\n"
        connection.sendall(head.encode() + b"%x\r\n" % 30_000 + b"x" * 30_000 + b"\r\n0\r\n\r\n")
        assert b" 413 " in connection.recv(65_536).split(b"\r\n")[0]
    compressed = send(f"{locked.url}{TEXT}", b"\x1f\x8b", key | {"Content-Encoding": "gzip"})
    assert compressed.status == 415


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 15_000,
        b'{"a":' * 3_000 + b"1" + b"}" * 3_000,
        b'{"prompt": "x", "guided_json": ' + b'{"a":' * 70 + b"1" + b"}" * 71,
        b'{"prompt": "x", "n": 1e400}',
        b'{"prompt": "x", "n": 99999999999999999999999999}',
        b'{"prompt": "x", "seed": -99999999999999999999999999, "max_tokens": 1.5}',
        b'{"prompt": [99999999999999999999999999]}',
        b'{"prompt": "x", "logit_bias": {"' + b"9" * 5_000 + b'": 1}}',
        b'{"prompt": "x", "top_k": 99999999999999999999999999, "temperature": "hot"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\xff"}',
        b"\x00",
        b"",
        b"null",
    ],
)
def test_hostile_bodies_are_the_clients_error(server: Server, body: bytes) -> None:
    answer = send(f"{server.url}{TEXT}", body)
    assert answer.status == 400 and answer.json["error"]["message"]


def test_a_number_that_is_too_large_for_the_engine_is_handled(server: Server) -> None:
    for field in ("seed", "top_k", "max_tokens", "min_tokens"):
        answer = send(f"{server.url}{TEXT}", {**SAY, field: 10**30})
        assert answer.status in (200, 400), field
    assert send(f"{server.url}{TEXT}", SAY).status == 200


def test_unknown_paths_and_methods(server: Server) -> None:
    assert send(f"{server.url}/v1/images").code == "not_found"
    assert send(f"{server.url}{TEXT}").code == "method_not_allowed"
    assert send(f"{server.url}/../../etc/passwd").status == 404


# Values that are wrong for most fields.
_ODD: tuple[Any, ...] = (
    None, True, -1, 0, 10**12, 1e308, -0.5, "", "\x00", "☃" * 50, [], {}, [[]], {"a": {}}, ["a", 1], [None], "[[",
    10**25,
)  # fmt: skip
_BODIES: tuple[tuple[str, dict[str, Any]], ...] = (
    (TEXT, {"prompt": "[[say ab]]", "max_tokens": 2, "stream": False, "stop": ["x"], "logit_bias": {"5": 1}}),
    (CHAT, {"messages": [{"role": "user", "content": "[[say ab]]"}], "max_tokens": 2, "tools": [], "seed": 1}),
    ("/v1/embeddings", {"input": ["ab"], "encoding_format": "float"}),
    ("/tokenize", {"messages": [{"role": "user", "content": "x"}], "add_special_tokens": True}),
    ("/detokenize", {"tokens": [5, 6]}),
)
_NAMES = (
    "n", "stop", "logprobs", "top_logprobs", "tools", "tool_choice", "response_format", "structured_outputs",
    "guided_json",
    "temperature", "top_k", "min_p", "messages", "prompt", "input", "stream", "stream_options", "session_id", "model",
    "chat_template_kwargs", "echo", "min_tokens", "stop_token_ids", "presence_penalty",
)  # fmt: skip


def malformed(draw: random.Random) -> bytes:
    """Returns a request with something wrong: in its JSON, in its bytes, or in its headers."""
    path, known = draw.choice(_BODIES)
    body = dict(known)
    for _ in range(draw.randrange(3)):
        body[draw.choice((*_NAMES, *body))] = draw.choice(_ODD)
    data = bytearray(json.dumps(body).encode())
    if draw.random() < 0.3:
        for _ in range(draw.randrange(1, 4)):
            data[draw.randrange(len(data))] = draw.randrange(256)
    path = path if draw.random() < 0.9 else draw.choice(("/v1/models/x", "/%00", "/v1//", "/metrics", CHAT))
    method = draw.choice(("POST",) * 8 + ("GET", "PUT", "HEAD", "ÄÖ", "TRACE"))
    length = len(data) if draw.random() < 0.9 else draw.choice((0, len(data) // 2, len(data) + 5, -1, 10**20, "x"))
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    whole = f"{head}Content-Length: {length}\r\n\r\n".encode("latin-1") + bytes(data)
    if draw.random() < 0.2:
        damaged = bytearray(whole)
        damaged[draw.randrange(len(head))] = draw.randrange(256)
        whole = bytes(damaged)
    return whole


def check_malformed(server: Server, count: int) -> Counter[int]:
    """Sends malformed requests, several at a time; returns how often each status was the answer (0: none)."""
    draw = random.Random(29)
    requests = [malformed(draw) for _ in range(count)]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda data: send_raw(server.url, data), requests))
    statuses = Counter[int]()
    for data, answer in zip(requests, answers, strict=True):
        status = int(answer.split(b" ", 2)[1]) if answer else 0
        assert status < 500, (data, answer)
        statuses[status] += 1
    assert send(f"{server.url}{TEXT}", SAY).status == 200
    deadline_s = time.monotonic() + PATIENCE_S
    while server.services.engine.requests or server.services.admission.running:
        assert time.monotonic() < deadline_s, "requests were left"
        time.sleep(0.05)
    return statuses


@pytest.fixture(scope="module")
def hurried(folder: Path) -> Iterator[Server]:
    """Does not wait long for the rest of a request that never comes."""
    with make_server(folder, body_s=0.2, request_s=0.5) as running:
        yield running


@pytest.mark.usefixtures("no_errors_logged")
def test_malformed_requests_are_never_a_server_error(hurried: Server) -> None:
    statuses = check_malformed(hurried, 300)
    # The requests reach every part of the server.
    assert {200, 400, 404, 405} <= set(statuses) and statuses[200] > 20, statuses


@pytest.mark.slow
@pytest.mark.usefixtures("no_errors_logged")
def test_ten_thousand_malformed_requests(hurried: Server) -> None:
    check_malformed(hurried, 10_000)

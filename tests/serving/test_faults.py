"""What goes wrong: a dead or stuck engine, clients that leave or stall, overload, and the end of the server."""

import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from redline.errors import RedlineError
from redline.serving.server import EngineSource, Server
from serving.conftest import make_server
from serving.plain_http import PATIENCE_S, Answer, opened, send, send_raw

ENDLESS = {"prompt": "x", "max_tokens": 400, "ignore_eos": True}


def wait_until(holds: Callable[[], object], timeout_s: float = PATIENCE_S) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline_s, "waited too long"
        time.sleep(0.01)


def complete(server: Server, **fields: Any) -> Answer:
    return send(f"{server.url}/v1/completions", {"prompt": "[[say ab]]", **fields})


def running(server: Server) -> int:
    text = send(f"{server.url}/metrics").body.decode()
    return int(float(re.findall(r"^redline:num_requests_running\{.*\} (\S+)$", text, re.MULTILINE)[0]))


def stream_of(server: Server, body: dict[str, Any]) -> str:
    with opened(f"{server.url}/v1/completions", {**body, "stream": True}) as response:
        return response.read().decode()


def test_a_killed_engine_ends_requests_with_an_error_and_comes_back(folder: Path) -> None:
    with make_server(folder, step_s=0.01) as server, ThreadPoolExecutor(8) as pool:
        streams = [pool.submit(stream_of, server, ENDLESS) for _ in range(4)]
        wholes = [pool.submit(complete, server, **ENDLESS) for _ in range(4)]
        wait_until(lambda: running(server) == 8)
        first = server.engine_pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        for stream in streams:
            text = stream.result(PATIENCE_S)
            assert "event: error\ndata: " in text and "engine_died" in text and "[DONE]" not in text
        assert {whole.result(PATIENCE_S).status for whole in wholes} == {503}
        health, refused = send(f"{server.url}/health"), complete(server)
        assert health.status == 503 and refused.status == 503 and refused.code == "engine_restarting"
        assert "retry-after" in refused.headers
        wait_until(lambda: send(f"{server.url}/health").status == 200)
        assert server.engine_pid != first and complete(server).json["choices"][0]["text"] == "ab"
        assert 'redline:engine_restarts_total{model_name="tiny"} 1.0' in send(f"{server.url}/metrics").body.decode()


def test_an_engine_that_is_stuck_is_killed(folder: Path) -> None:
    with make_server(folder, silence_s=1.5) as server:
        time.sleep(1.7)  # silence without requests is no fault
        assert complete(server).status == 200
        assert complete(server, prompt="[[hang]]").status == 503
        wait_until(lambda: send(f"{server.url}/health").status == 200)


def test_the_engine_process_ends_with_the_server(folder: Path) -> None:
    with make_server(folder) as server:
        pid = server.engine_pid
        assert pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_an_engine_that_cannot_be_built_is_an_error(folder: Path) -> None:
    with pytest.raises(RedlineError, match="no such plan"):
        make_server(folder, error="no such plan").start()
    with pytest.raises(RedlineError, match="cannot be imported"):
        Server(folder, EngineSource("serving.fake_engine:nothing"), port=0).start()


def test_what_the_engine_refuses_is_the_clients_error(folder: Path, server: Server) -> None:
    answer = complete(server, prompt="[[refuse the grammar is empty]]")
    assert answer.status == 400 and answer.json["error"]["message"] == "the grammar is empty"
    failed = {"prompt": "[[fail too complex]]"}
    assert complete(server, **failed).status == 500
    assert complete(server, **failed, guided_regex="x").json["error"]["message"] == "too complex"


@pytest.mark.usefixtures("no_errors_logged")
def test_many_clients_leave_and_the_others_are_answered(folder: Path) -> None:
    with make_server(folder, step_s=0.002) as server, ThreadPoolExecutor(8) as pool:

        def use(number: int) -> int:
            if number % 3:
                return complete(server, stream=False).status
            with opened_later(server, {**ENDLESS, "stream": bool(number % 2)}) as leave:
                time.sleep(0.01 * (number % 5))
                leave()
            return 0

        assert sorted(set(pool.map(use, range(60)))) == [0, 200]
        wait_until(lambda: not server.services.engine.requests and not server.services.admission.running)
        wait_until(lambda: running(server) == 0)


@pytest.mark.alone
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_request_within_100_ms(folder: Path, stream: bool) -> None:
    with make_server(folder, step_s=0.01) as server:
        body = {**ENDLESS, "stream": stream}
        with opened_later(server, body) as leave:
            wait_until(lambda: running(server) == 1)
            leave()
            begun_s = time.monotonic()
            wait_until(lambda: server.services.engine.requests == 0)
            assert time.monotonic() - begun_s < 0.1
            wait_until(lambda: running(server) == 0)
        assert server.services.admission.running == 0


class opened_later:
    """Sends a request without waiting for its response; calling the context closes the connection."""

    def __init__(self, server: Server, body: dict[str, Any]) -> None:
        import json

        data = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        self._socket = socket.create_connection(("127.0.0.1", server.port), PATIENCE_S)
        self._socket.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)

    def __enter__(self) -> Callable[[], None]:
        return self._socket.close

    def __exit__(self, *_: object) -> None:
        self._socket.close()


@pytest.mark.usefixtures("no_errors_logged")
def test_a_client_that_stops_reading_is_closed(folder: Path) -> None:
    with make_server(folder, stall_s=0.2) as server:
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.connect(("127.0.0.1", server.port))
            body = b'{"prompt": "x", "n": 64, "max_tokens": 400, "ignore_eos": true, "stream": true, "logprobs": 20}'
            head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            slow.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            wait_until(lambda: server.services.admission.running == 1)
            wait_until(lambda: server.services.admission.running == 0)
        assert complete(server).status == 200


def test_a_silent_stream_is_kept_awake(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("redline.serving.engine_process._PING_EVERY_S", 0.05)
    with make_server(folder, step_s=0.3) as server:
        events = stream_of(server, {"prompt": "[[say ab]]"}).split("\n\n")
    assert ": keep-alive" in events and events[-2] == "data: [DONE]"


def test_overload_is_answered_with_429_at_once(folder: Path) -> None:
    with make_server(folder, step_s=0.05, queue_requests=4) as server, ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda _: complete(server), range(16)))
        statuses = [answer.status for answer in answers]
        assert set(statuses) == {200, 429} and 4 <= statuses.count(200) < 16
        refused = next(answer for answer in answers if answer.status == 429)
        assert refused.code == "overloaded" and int(refused.headers["retry-after"]) >= 1
        assert complete(server).status == 200 and server.services.admission.waiting == 0


def test_draining_finishes_running_requests_and_refuses_new_ones(folder: Path) -> None:
    with make_server(folder, step_s=0.02) as server, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(complete, server, prompt="x", max_tokens=25, ignore_eos=True)
        wait_until(lambda: running(server) == 1)
        server.drain()
        wait_until(lambda: send(f"{server.url}/health").status == 503)
        assert complete(server).code == "shutting_down"
        assert answer.result(PATIENCE_S).status == 200
        assert server.wait(PATIENCE_S)


@pytest.mark.parametrize("twice", [False, True])
def test_what_is_not_done_when_draining_ends_gets_an_error_event(folder: Path, twice: bool) -> None:
    server = make_server(folder, step_s=0.02, drain_s=30.0 if twice else 0.2)
    with server, ThreadPoolExecutor(1) as pool:
        stream = pool.submit(stream_of, server, ENDLESS)
        wait_until(lambda: running(server) == 1)
        server.drain()
        if twice:
            server.drain()
        assert server.wait(PATIENCE_S / 2)
        text = stream.result(PATIENCE_S)
        assert "event: error" in text and "shutting_down" in text


def test_health_is_503_while_the_model_is_loaded(folder: Path) -> None:
    server = make_server(folder)
    starting = threading.Thread(target=server.start)
    starting.start()
    try:
        answers = []
        wait_until(lambda: server._web.loop is not None)
        while starting.is_alive():
            answers.append(send(f"{server.url}/health").status)
        assert answers[0] == 503 and send(f"{server.url}/health").status == 200
    finally:
        starting.join()
        server.close()


def test_connections_that_send_nothing_are_closed(folder: Path) -> None:
    with make_server(folder, request_s=0.6, body_s=0.6) as server:
        slow = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        for begun in (b"", b"GET / HT", slow, slow + b"Content-Length: 9\r\n\r\n{"):
            with socket.create_connection(("127.0.0.1", server.port), PATIENCE_S) as connection:
                connection.sendall(begun)
                answer = connection.recv(65_536)
                assert answer == b"" or b"408" in answer.split(b"\r\n")[0], begun
        # A connection that is kept alive gets the same deadline for the body of a later request.
        with socket.create_connection(("127.0.0.1", server.port), PATIENCE_S) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b"200 OK" in connection.recv(65_536)
            connection.sendall(slow + b"Content-Length: 9\r\n\r\n{")
            assert b"408" in connection.recv(65_536).split(b"\r\n")[0]
        assert complete(server).status == 200


def test_an_idle_flood_does_not_keep_others_out(folder: Path) -> None:
    with make_server(folder, connections=16) as server:
        idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(40)]
        assert complete(server).status == 200
        for connection in idle:
            connection.close()


def test_raw_garbage_is_refused(folder: Path) -> None:
    with make_server(folder, request_s=0.3) as server:
        for data in (b"\x16\x03\x01\x02\x00", b"GET / HTTP/9.9\r\n\r\n", b"\r\n" * 50, b"A" * 100_000):
            answer = send_raw(server.url, data)
            assert not answer or re.match(rb"HTTP/1\.\d (400|404|403|505)", answer), answer[:80]
        assert complete(server).status == 200

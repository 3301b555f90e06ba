"""Another server behind ours, as vLLM's: the same keys, limits and errors."""

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from redline.errors import RedlineError
from redline.serving.keys import Keys
from redline.serving.limits import Limits
from redline.serving.server import Server, UpstreamSource
from redline.serving.upstream_process import vllm_command
from serving import fake_upstream
from serving.plain_http import PATIENCE_S, opened, send
from serving.test_faults import wait_until

KEY = "a-long-enough-key"
TEXT = "/v1/completions"
BEARER = {"Authorization": f"Bearer {KEY}"}


def command(port: int, key: str) -> tuple[list[str], dict[str, str]]:
    return [sys.executable, fake_upstream.__file__ or "", str(port)], {"VLLM_API_KEY": key}


def make(folder: Path) -> Server:
    source = UpstreamSource("the fake server", command)
    return Server(folder, source, port=0, keys=Keys.of({"key": KEY}), limits=Limits(drain_s=0.2))


@pytest.fixture(scope="module")
def front(folder: Path) -> Iterator[Server]:
    with make(folder) as running:
        yield running


def test_requests_are_forwarded_with_our_key_checked(front: Server) -> None:
    client = openai.OpenAI(base_url=f"{front.url}/v1", api_key=KEY, max_retries=0)
    answer = client.completions.create(model="tiny", prompt="abc")
    assert (answer.model, answer.choices[0].text) == ("tiny", "abc")
    chunks = list(client.completions.create(model="tiny", prompt="abc", stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "abc" * 3
    client.close()
    assert send(f"{front.url}{TEXT}", {"prompt": "abc"}).status == 401
    assert "redline:time_to_first_token_seconds_count" in send(f"{front.url}/metrics", headers=BEARER).body.decode()


def test_errors_of_both_servers(front: Server) -> None:
    assert send(f"{front.url}{TEXT}", {"model": "other", "prompt": "x"}, BEARER).code == "model_not_found"
    assert send(f"{front.url}{TEXT}", {"prompt": "x", "n": 10**6}, BEARER).status == 400
    refused = send(f"{front.url}{TEXT}", {"input": "x"}, BEARER)
    assert (refused.status, refused.code) == (400, "upstream")


def test_a_crash_ends_requests_with_an_error_and_is_repaired(front: Server) -> None:
    assert send(f"{front.url}{TEXT}", {"prompt": "crash"}, BEARER).code == "engine_died"
    wait_until(lambda: front.services.backend.restarts == 1 and send(f"{front.url}/health").status == 200)
    with opened(f"{front.url}{TEXT}", {"prompt": "crash later", "stream": True}, BEARER) as response:
        assert "event: error" in response.read().decode()
    wait_until(lambda: front.services.backend.restarts == 2 and send(f"{front.url}/health").status == 200)
    assert send(f"{front.url}{TEXT}", {"prompt": "abc"}, BEARER).status == 200


def test_a_server_that_outlives_its_engine_is_restarted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("redline.serving.upstream_process._LOOK_EVERY_S", 0.1)
    with make(folder) as server:
        assert send(f"{server.url}{TEXT}", {"prompt": "sick"}, BEARER).status == 500
        wait_until(lambda: server.services.backend.restarts == 1 and send(f"{server.url}/health").status == 200)
        assert send(f"{server.url}{TEXT}", {"prompt": "abc"}, BEARER).status == 200


def test_draining_ends_streams_with_an_error_event(folder: Path) -> None:
    with make(folder) as server, ThreadPoolExecutor(1) as pool:

        def read() -> str:
            with opened(f"{server.url}{TEXT}", {"prompt": "slow", "stream": True}, BEARER) as response:
                return response.read().decode()

        text = pool.submit(read)
        wait_until(lambda: server.services.admission.running == 1 and not server.services.admission.waiting)
        server.drain()
        assert "shutting_down" in text.result(PATIENCE_S)
        assert server.wait(PATIENCE_S)


def test_a_server_that_cannot_start_is_an_error(folder: Path) -> None:
    def missing(port: int, key: str) -> tuple[list[str], dict[str, str]]:
        return ["/nonexistent/python"], {}

    def failing(port: int, key: str) -> tuple[list[str], dict[str, str]]:
        return [sys.executable, "-c", "raise SystemExit('no module named vllm')"], {}

    with pytest.raises(RedlineError, match="cannot be started: /nonexistent/python"):
        Server(folder, UpstreamSource("vLLM", missing), port=0).start()
    with pytest.raises(RedlineError, match="exit code 1: no module named vllm"):
        Server(folder, UpstreamSource("vLLM", failing), port=0).start()


def test_the_command_of_vllm() -> None:
    words, variables = vllm_command(Path("/m"), "tiny", "/venv/bin/python", ("--enforce-eager",))(81, "secret")
    assert words[:3] == ["/venv/bin/python", "-m", "vllm.entrypoints.openai.api_server"]
    assert words[-1] == "--enforce-eager" and variables["VLLM_API_KEY"] == "secret" and "secret" not in words

"""`redline serve`, run in this process with the fake engine."""

import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import redline.cli
from redline.serving import serve as module
from serving.plain_http import send
from serving.test_faults import wait_until

KEY = "a-long-enough-key"
Call = Callable[..., tuple[int, str]]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Call:
    """`call("serve", …, then=function)` runs the command, calls the function once it serves, and then ends it."""
    monkeypatch.setattr(module, "MODEL_ENGINE", "serving.fake_engine:load_model")
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object, then: Callable[[], object] | None = None) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["redline", *map(str, arguments)])
        failures: list[BaseException] = []

        def use() -> None:
            try:
                assert then is not None
                then()
            except BaseException as error:
                failures.append(error)
            finally:
                os.kill(os.getpid(), signal.SIGTERM)

        user = threading.Thread(target=use)
        if then is not None:
            user.start()
        with pytest.raises(SystemExit) as end:
            redline.cli.main()
        if then is not None:
            user.join()
        assert not failures, failures
        return int(end.value.code or 0), capfd.readouterr().err

    return run


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def is_ready(url: str) -> bool:
    try:
        return send(f"{url}/health").status == 200
    except ConnectionError:
        return False


def test_it_prints_how_to_call_it_and_ends_at_sigterm(call: Call, folder: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"

    def then() -> None:
        wait_until(lambda: is_ready(url))
        assert send(f"{url}/v1/completions", {"prompt": "[[say ab]]"}).json["choices"][0]["text"] == "ab"

    code, err = call("serve", folder, "--port", port, then=then)
    assert code == 0 and f"serving tiny at {url}" in err and "ready after" in err and "fake" in err
    assert f"curl {url}/v1/chat/completions -H 'Content-Type: application/json'" in err
    assert err.rstrip().endswith("the server has ended.")


def test_keys_and_json_logs(call: Call, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"alice = {KEY}\n")
    port = free_port()
    url = f"http://127.0.0.1:{port}"

    def then() -> None:
        wait_until(lambda: is_ready(url))
        assert send(f"{url}/v1/models").status == 401
        assert send(f"{url}/v1/models", headers={"Authorization": f"Bearer {KEY}"}).json["data"][0]["id"] == "mine"

    code, err = call("serve", folder, "--port", port, "--api-keys", "keys", "--name", "mine", "--json-logs", then=then)
    lines: list[Any] = [json.loads(line) for line in err.splitlines()]
    assert code == 0 and next(line for line in lines if line.get("message") == "ready")["url"] == url
    requests = [(line["status"], line["caller"]) for line in lines if line.get("path") == "/v1/models"]
    assert requests == [(401, "anyone"), (200, "alice")] and KEY not in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host", "0.0.0.0"], "can be reached from other machines"),
        (["--api-key", "short"], "at least 12"),
        (["--api-keys", "missing"], "cannot read the API keys"),
        (["--engine", "llama"], "unknown engine 'llama' (known: redline, vllm)"),
        (["--engine", "vllm", "--max-rows", "3"], "the engine vllm does not take max_rows"),
        (["--vllm-python", "python3"], "options of vLLM need the engine vllm"),
        (["--port", "99999"], "invalid port 99999"),
        (["--precision", "fp8"], "no fp8 here"),
    ],
)
def test_bad_options_are_one_sentence(call: Call, folder: Path, arguments: list[str], message: str) -> None:
    code, err = call("serve", folder, "--port", "0", *arguments)
    assert code == 2 and message in " ".join(err.split()) and "Traceback" not in err


def test_a_folder_without_a_model(call: Call, tmp_path: Path) -> None:
    assert call("serve", tmp_path, "--port", "0")[0] == 2

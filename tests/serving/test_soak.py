"""Mixed traffic with faults for a long time: nothing grows. REDLINE_SOAK_S sets the seconds (default: ten minutes)."""

import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import redline
from serving.conftest import make_server
from serving.plain_http import opened, send, send_raw
from serving.test_faults import ENDLESS, opened_later, wait_until
from serving.test_real_engine import model as model  # the fixture
from serving.test_security import malformed

_CLIENTS = 6
_WARM_SHARE = 0.25
SECONDS = float(os.environ.get("REDLINE_SOAK_S", "600"))


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident_kib(pid: int | str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


class Traffic:
    """Clients in threads, each of which sends one kind of request after another until the end."""

    def __init__(self, url: str, server: Any) -> None:
        self.url, self._server = url, server
        self._end = threading.Event()
        self.failures: list[str] = []
        self.answers = 0
        self._threads = [threading.Thread(target=self._run, args=(seed,)) for seed in range(_CLIENTS)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join()

    def _run(self, seed: int) -> None:
        draw = random.Random(seed)
        while not self._end.is_set():
            try:
                self._send(draw)
                self.answers += 1
            except ConnectionError:
                pass
            except Exception as error:
                self.failures.append(repr(error))
                return

    def _send(self, draw: random.Random) -> None:
        kind = draw.random()
        body: dict[str, Any] = {"prompt": "the sea " * draw.randrange(1, 12), "max_tokens": draw.randrange(1, 24)}
        if kind < 0.3:
            with opened_later(self._server, {**ENDLESS, "max_tokens": 60, "stream": draw.random() < 0.5}) as leave:
                time.sleep(draw.random() * 0.1)
                leave()
        elif kind < 0.4:
            send_raw(self.url, malformed(draw), timeout_s=60)
        elif kind < 0.7:
            with opened(f"{self.url}/v1/completions", {**body, "stream": True, "logprobs": 2}) as response:
                response.read()
        else:
            status = send(f"{self.url}/v1/completions", {**body, "n": draw.randrange(1, 4)}).status
            assert status in (200, 429, 503), status


def soak(server: Any, seconds: float, kill: bool) -> None:
    traffic = Traffic(server.url, server)
    traffic.start()
    try:
        begun_s, killed_s = time.monotonic(), time.monotonic()
        before: tuple[int, int, int] | None = None
        while (now_s := time.monotonic()) - begun_s < seconds:
            time.sleep(0.2)
            if kill and now_s - killed_s > seconds / 5 and server.services.backend.state.name == "READY":
                killed_s = now_s
                os.kill(server.engine_pid, signal.SIGKILL)
            if before is None and now_s - begun_s > _WARM_SHARE * seconds:
                before = (open_files(), resident_kib("self"), resident_kib(server.engine_pid))
    finally:
        traffic.stop()
    assert not traffic.failures and traffic.answers > seconds
    wait_until(lambda: send(f"{server.url}/health").status == 200)
    wait_until(lambda: not server.services.engine.requests and not server.services.admission.running)
    admission = server.services.admission
    assert (admission.waiting, admission.waiting_tokens) == (0, 0)
    assert send(f"{server.url}/v1/completions", {"prompt": "a", "max_tokens": 2}).status == 200
    wait_until(lambda: server.services.backend.stats.running == 0)
    assert before is not None
    wait_until(lambda: open_files() <= before[0] + 4)
    assert resident_kib("self") < before[1] + 64 * 1024
    if not kill:
        assert resident_kib(server.engine_pid) < before[2] + 128 * 1024
        # Cached blocks count as free: nothing else holds one when nothing runs.
        assert server.services.backend.stats.blocks_used == 0


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 300)
def test_the_engine_under_mixed_traffic(model: Path) -> None:
    with redline.serve(model, port=0, device="cpu", max_rows=8, blocks=64) as server:
        soak(server, SECONDS / 2, kill=False)


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 300)
def test_the_server_while_its_engine_is_killed(folder: Path) -> None:
    with make_server(folder, step_s=0.001, body_s=0.5, request_s=1.0) as server:
        soak(server, SECONDS / 2, kill=True)
        assert server.services.backend.restarts >= 3

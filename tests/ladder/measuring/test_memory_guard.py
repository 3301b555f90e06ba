"""The memory guard: a trial that would exhaust the machine is ended with its compilers, and the climb goes on."""

import functools
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from patience import PATIENCE_S
from redline.ladder.measuring import memory_guard, worker_pool
from redline.ladder.measuring.memory_guard import MemoryGuard
from redline.ladder.measuring.worker_pool import WorkerFailed, WorkerPool

GIB = 2**30


@pytest.fixture
def available(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The available memory, which a test sets."""
    free = [100 * GIB]
    monkeypatch.setattr(memory_guard, "available_host_bytes", lambda: free[0])
    return free


def test_the_largest_worker_is_ended_while_memory_is_short(
    available: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[tuple[int, str]] = []
    guard = MemoryGuard(lambda: [11, 12, 13], lambda pid, reason: ended.append((pid, reason)))
    monkeypatch.setattr(memory_guard, "_bytes_by_session", lambda: {11: GIB, 12: 5 * GIB, 99: 50 * GIB})
    guard.check()
    assert ended == []
    available[0] = guard.least_bytes - 1
    guard.check()
    ((pid, reason),) = ended
    assert pid == 12 and reason.startswith("the trial used 5 GiB of host memory (with its compilers)")


def test_the_memory_of_a_session_includes_its_children() -> None:
    code = (
        "import subprocess, sys; x = bytearray(50 * 2**20); p = subprocess.Popen([sys.executable, '-c', "
        + repr("x = bytearray(100 * 2**20); print(flush=True); import time; time.sleep(600)")
        + "], start_new_session=False); p.wait()"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert process.stdout is not None and process.stdout.readline()
        assert memory_guard._bytes_by_session()[process.pid] > 150 * 2**20
    finally:
        memory_guard.os.killpg(process.pid, 9)
        process.communicate()


def test_a_trial_that_exhausts_the_memory_fails_and_others_go_on(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    small, large = pool.start(), pool.start()
    assert small.ask("machine", PATIENCE_S, device="cpu", measure=False)["device"] == "cpu"
    allocated = tmp_path / "allocated"
    monkeypatch.setattr(
        memory_guard, "available_host_bytes", lambda: 0 if allocated.exists() and not large.ended else 100 * GIB
    )
    code = "import pathlib, time; held = bytearray(2**28); pathlib.Path(path).touch(); time.sleep(600)"
    function = pickle.dumps(functools.partial(exec, code, {"path": str(allocated)}))
    with pytest.raises(WorkerFailed, match="of host memory .with its compilers") as failure:
        large.ask("call", PATIENCE_S, function=function, path=[])
    assert failure.value.kind == "oom"
    assert small.ask("machine", PATIENCE_S, device="cpu", measure=False)["device"] == "cpu"
    small.stop()


@pytest.mark.parametrize(("free", "count"), [(64 * GIB, 8), (16 * GIB, 4), (GIB, 1)])
def test_the_number_of_compilers_is_bounded_by_the_free_memory(
    free: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_pool, "cores", lambda: 8)
    monkeypatch.setattr(worker_pool, "available_host_bytes", lambda: free)
    assert worker_pool._compile_threads() == count

"""Ctrl-C and SIGTERM: a command ends in order, and leaves no file and no process behind."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import redline.cli
from redline.cli.signals import sigterm_as_interrupt, uninterrupted_imports
from redline.ladder.measuring.worker_pool import WorkerPool

from .conftest import TINY


def test_sigterm_ends_a_climb_without_leftovers(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    scratch, pools = tmp_path / "scratch", []
    scratch.mkdir()

    def signalled(pool: WorkerPool, *_: Any, **__: Any) -> None:
        pools.append(pool)
        pool.start()
        assert list(scratch.iterdir()) != []
        # `timeout` and batch systems signal the whole process group.
        os.kill(pool._process.pid, signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    monkeypatch.setattr("redline.ladder.search.trials.ask_machine", signalled)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["redline", "climb", f"{TINY}:perceptron", "--device", "cpu"])
    with pytest.raises(SystemExit) as end:
        redline.cli.main()
    assert end.value.code == 143 and "redline: terminated." in capfd.readouterr().err
    assert list(scratch.iterdir()) == []
    (pool,) = pools
    assert pool._process.returncode == 0, "it ended by itself, after its workers"
    assert [os.path.exists(f"/proc/{worker.pid}") for worker in pool._workers] == [False]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_pool_that_is_interrupted_while_it_starts_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    process: list[subprocess.Popen[bytes]] = []

    class Interrupted(subprocess.Popen):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            process.append(self)
            threading.Timer(0.2, signal.pthread_kill, [threading.main_thread().ident, signal.SIGTERM]).start()

    monkeypatch.setattr("subprocess.Popen", Interrupted)
    with sigterm_as_interrupt(), pytest.raises(KeyboardInterrupt), WorkerPool():
        pass
    assert process[0].returncode is not None and list(tmp_path.iterdir()) == []


def test_a_second_sigterm_does_not_interrupt_the_cleanup() -> None:
    cleaned = False
    with sigterm_as_interrupt() as termination, pytest.raises(KeyboardInterrupt):
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGTERM)
            cleaned = True
    assert cleaned and termination.requested


def test_a_handler_of_the_caller_stays() -> None:
    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    try:
        with sigterm_as_interrupt() as termination, uninterrupted_imports():
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert came == [signal.SIGTERM] and not termination.requested


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_imports_takes_effect_after_them(number: signal.Signals) -> None:
    """Some packages take the interrupt for a missing dependency and continue without it."""
    imported = False
    with sigterm_as_interrupt(), pytest.raises(KeyboardInterrupt), uninterrupted_imports(), suppress(BaseException):
        signal.raise_signal(number)
        imported = True
    assert imported and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_ctrl_c_during_imports_takes_effect_at_once() -> None:
    finished = False
    with pytest.raises(KeyboardInterrupt), uninterrupted_imports():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        finished = True
    assert not finished and signal.getsignal(signal.SIGINT) is signal.default_int_handler

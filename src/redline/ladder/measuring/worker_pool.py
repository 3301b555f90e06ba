"""Starts, talks to and ends worker processes; a worker that crashes or hangs is an ordinary answer."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from redline.errors import RedlineError


class WorkerFailed(RedlineError):
    """A worker could not answer. `kind`: unavailable, refused, oom, timeout, crash, error or workload."""

    def __init__(self, kind: str, message: str, pid: int | None = None) -> None:
        super().__init__(message)
        self.kind, self.pid = kind, pid


class Worker:
    """One child process that builds a workload, applies a plan, and runs it when asked."""

    def __init__(self, pool: "WorkerPool", pid: int, channel: Connection, log: Path) -> None:
        self.pid = pid
        self._pool = pool
        self._channel = channel
        self._log = log

    def ask(self, request: str, timeout_s: float, **arguments: Any) -> Any:
        """Sends a request and waits for its answer; raises `WorkerFailed` with the reason when none comes."""
        try:
            self._channel.send_bytes(json.dumps({"request": request, **arguments}).encode())
            if not self._channel.poll(timeout_s):
                self.stop()
                raise WorkerFailed("timeout", f"no result within {timeout_s:.0f} s; it was stopped", self.pid)
            answer = json.loads(self._channel.recv_bytes())
        except (EOFError, OSError):
            raise WorkerFailed("crash", self._last_words(), self.pid) from None
        if "failed" in answer:
            if answer["failed"] == "oom":
                self.stop()
            raise WorkerFailed(answer["failed"], answer["message"], self.pid)
        return answer["result"]

    def _last_words(self) -> str:
        status = self._pool.exit_status(self.pid)
        # Its end of the connection closes a moment before the process is gone.
        deadline = time.monotonic() + 2.0
        while status is None and time.monotonic() < deadline:
            time.sleep(0.02)
            status = self._pool.exit_status(self.pid)
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        said = f": {lines[-1].strip()[:200]}" if lines else ""
        if status is not None and status < 0:
            name = signal.Signals(-status).name
            hint = " (the system ran out of memory?)" if name == "SIGKILL" else ""
            return f"the process died of {name}{hint}{said}"
        return f"the process ended with code {status}{said}"

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            self._channel.close()
        deadline = time.monotonic() + 10
        while self._pool.exit_status(self.pid) is None and time.monotonic() < deadline:
            time.sleep(0.01)


class WorkerPool:
    """A context manager around the process that forks workers; leaves no process and no file behind."""

    def __init__(self, environment: dict[str, str] | None = None) -> None:
        self._environment = environment or {}
        self._statuses: dict[int, int] = {}
        self._workers: list[Worker] = []
        # Set-ups run in several threads, and there is one line to the process that forks.
        self._line = threading.RLock()

    def __enter__(self) -> "WorkerPool":
        self._scratch = tempfile.TemporaryDirectory(prefix="redline-", ignore_cleanup_errors=True)
        self.scratch = Path(self._scratch.name)
        self._control, theirs = socket.socketpair()
        self._reader = self._control.makefile("rb")
        environment = {
            **os.environ,
            # Lets the preload ask whether there is a GPU without starting CUDA, which a fork could not inherit.
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
            # Cold caches, so that the compile times of a climb are those of a first run.
            "TORCHINDUCTOR_CACHE_DIR": str(self.scratch / "inductor"),
            "TRITON_CACHE_DIR": str(self.scratch / "triton"),
            # What a killed worker leaves in its temporary folder goes with the pool.
            "TMPDIR": str(self.scratch),
            **self._environment,
        }
        command = [sys.executable, "-m", "redline.ladder.measuring.fork_server", str(theirs.fileno())]
        log = (self.scratch / "zygote.log").open("wb")
        self._process = subprocess.Popen(
            command,
            pass_fds=(theirs.fileno(),),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        try:
            theirs.close()
            log.close()
            if self._reader.readline() != b"ready\n":
                said = (self.scratch / "zygote.log").read_text(errors="replace").strip().splitlines()
                raise RedlineError(f"the worker process did not start: {said[-1] if said else 'no message'}.")
        except BaseException:
            self._process.kill()  # it would create folders in the scratch folder while it imports torch
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            if self._statuses.get(worker.pid) is None:
                worker.stop()
        self._reader.close()
        self._control.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._scratch.cleanup()

    def start(self) -> Worker:
        ours, theirs = socket.socketpair()
        with self._line:
            log = self.scratch / f"worker-{len(self._workers)}.log"
            with log.open("wb") as file:
                socket.send_fds(self._control, [b'{"fork": 1}'], [theirs.fileno(), file.fileno()])
            theirs.close()
            pid = json.loads(self._reader.readline())
            worker = Worker(self, pid, Connection(ours.detach()), log)
            self._workers.append(worker)
        return worker

    def exit_status(self, pid: int) -> int | None:
        with self._line:
            if pid not in self._statuses:
                self._control.sendall(json.dumps({"status": pid}).encode())
                status = json.loads(self._reader.readline())
                if status is None:
                    return None
                self._statuses[pid] = status
            return self._statuses[pid]

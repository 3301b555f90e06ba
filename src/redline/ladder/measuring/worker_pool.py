"""Starts worker processes by forking, sends them requests, and ends them. A worker may crash or hang at any time."""

import json
import os
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from redline.errors import RedlineError
from redline.ladder.measuring.compile_cache import compile_cache
from redline.ladder.measuring.memory_guard import MemoryGuard
from redline.machine.cores import cores
from redline.machine.host_memory import available_host_bytes
from redline.machine.processes import Child, ChildExited, ChildTimeout, last_line, start_module

# The largest number of workers that compile in parallel, and the host memory that each of their compilers needs.
_PARALLEL_SETUPS, _COMPILER_BYTES = 4, 2**30


class WorkerFailed(RedlineError):
    """Raised if a worker fails. `kind`: unavailable, refused, oom, timeout, crash, error, workload or lost."""

    def __init__(self, kind: str, message: str, pid: int | None = None) -> None:
        super().__init__(message)
        self.kind, self.pid = kind, pid


class ForkedProcess:
    """A process that the fork server started, and whose exit code only the fork server can read."""

    def __init__(self, pool: "WorkerPool", pid: int) -> None:
        self._pool, self.pid = pool, pid

    def poll(self) -> int | None:
        return self._pool.exit_code(self.pid)


class Worker(Child):
    """A child process that builds a workload, applies a plan, and runs it on request."""

    def __init__(self, process: ForkedProcess, connection: Connection, log: Path) -> None:
        super().__init__("the process", connection, process, log)
        self.pid = process.pid
        # The reason for which the memory guard ended the worker, if it did.
        self.ended = ""

    def ask(self, request: str, timeout_s: float, **arguments: Any) -> Any:
        """Calls a method of the worker's `Bench`. Raises `WorkerFailed` with the reason if there is no result."""
        try:
            answer = self.request((request, arguments), timeout_s)
        except ChildTimeout as error:
            raise WorkerFailed("timeout", str(error), self.pid) from None
        except ChildExited as error:
            if self.ended:
                raise WorkerFailed("oom", self.ended, self.pid) from error
            raise WorkerFailed("crash", str(error), self.pid) from error
        if "failed" in answer:
            if answer["failed"] == "oom":
                self.stop()
            failure = WorkerFailed(answer["failed"], answer["message"], self.pid)
            failure.add_note(answer["traceback"])  # printed with `--traceback`
            raise failure
        return answer["result"]

    def end(self, reason: str) -> None:
        """Kills the process and the compilers that it started; a waiting `ask` raises WorkerFailed with this reason."""
        self.ended = reason
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


class WorkerPool:
    """A context manager around the fork server; on exit it ends all workers and deletes their files."""

    def __init__(self) -> None:
        self._exit_codes: dict[int, int] = {}
        self._workers: list[Worker] = []
        self._requests = 0
        # Guards the socket to the fork server, which all threads that set up workers share.
        self._lock = threading.RLock()
        self._guard = MemoryGuard(self._running, self._end)

    def __enter__(self) -> "WorkerPool":
        self._scratch = tempfile.TemporaryDirectory(prefix="redline-", ignore_cleanup_errors=True)
        self.scratch = Path(self._scratch.name)
        compiled = compile_cache()
        environment = {
            "TORCHINDUCTOR_COMPILE_THREADS": str(_compile_threads()),
            **os.environ,
            # Makes torch look for a GPU with NVML, because CUDA, once started, does not work in forked processes.
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
            # The cache holds compiled code of earlier runs; a row whose set-up used such code is marked as cached.
            "TORCHINDUCTOR_CACHE_DIR": str(compiled / "inductor"),
            "TRITON_CACHE_DIR": str(compiled / "triton"),
            # A killed worker leaves temporary files, which are deleted with this folder.
            "TMPDIR": str(self.scratch),
        }
        log_path = self.scratch / "fork-server.log"
        with log_path.open("wb") as log:
            self._control, self._process = start_module(
                "redline.ladder.measuring.fork_server", environment=environment, stdout=log, stderr=log
            )
        self._reader = self._control.makefile("rb")
        try:
            if self._reader.readline() != b"ready\n":
                raise RedlineError(f"the fork server did not start: {last_line(log_path) or 'no message'}.")
        except BaseException:
            self._process.kill()  # otherwise it may create files in the scratch folder during its removal
            self.__exit__()
            raise
        self._guard.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._guard.stop()
        for worker in self._workers:
            if worker.pid not in self._exit_codes:
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
        with self._lock:
            log_path = self.scratch / f"worker-{len(self._workers)}.log"
            with ours, theirs, log_path.open("wb") as log:
                pid = self._ask_fork_server({"fork": 1}, theirs.fileno(), log.fileno())
                worker = Worker(ForkedProcess(self, pid), Connection(ours.detach()), log_path)
            self._workers.append(worker)
        return worker

    def _ask_fork_server(self, request: dict[str, Any], *descriptors: int) -> Any:
        with self._lock:
            self._requests += 1
            number = self._requests
            try:
                socket.send_fds(self._control, [json.dumps([number, request]).encode() + b"\n"], descriptors)
                # Skips the answers of interrupted requests, which nobody has read.
                while (line := self._reader.readline()) and (answer := json.loads(line))[0] != number:
                    pass
            except OSError as error:
                raise self._lost() from error
        if not line:
            raise self._lost()
        return answer[1]

    def _lost(self) -> RedlineError:
        reason = last_line(self.scratch / "fork-server.log") or "no message; was it killed, or did memory run out?"
        return RedlineError(f"the fork server, which starts all trial processes, has ended: {reason}.")

    def import_early(self, modules: Sequence[str]) -> None:
        """Imports modules in the fork server, so that all later workers have them."""
        if modules:
            path = self.scratch / "modules.json"
            path.write_text(json.dumps(modules))
            self._ask_fork_server({"modules": str(path)})

    def _running(self) -> list[int]:
        return [worker.pid for worker in self._workers if worker.pid not in self._exit_codes]

    def _end(self, pid: int, reason: str) -> None:
        next(worker for worker in self._workers if worker.pid == pid).end(reason)

    def exit_code(self, pid: int) -> int | None:
        """Returns the exit code of a worker, negative for a signal, or None while it runs."""
        with self._lock:
            if pid not in self._exit_codes:
                # After the fork server has ended, nobody can read exit codes, so the process counts as killed.
                is_lost = self._process.poll() is not None
                code = -signal.SIGKILL if is_lost else self._ask_fork_server({"status": pid})
                if code is None:
                    return None
                self._exit_codes[pid] = code
            return self._exit_codes[pid]


def _compile_threads() -> int:
    """Returns the number of compiler processes per worker; those of all parallel set-ups must fit in host memory."""
    fitting = available_host_bytes() // (_PARALLEL_SETUPS * _COMPILER_BYTES)
    return max(1, min(cores(), fitting))

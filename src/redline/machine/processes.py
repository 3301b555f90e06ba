"""Starts child processes, sends them requests with a time limit, explains why they ended, and ends them.

Each child has its own connection and shares no lock, so killing one affects no other: the parent only sees its
connection close. Each child leads a process group of its own: Ctrl-C in a terminal reaches the parent alone, and ending
a child also ends the compilers that it started.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any, Protocol

from redline.errors import RedlineError

# How long a killed process may take to end.
_KILL_S = 10.0


class ChildTimeout(RedlineError):
    """The child did not answer in time; it was killed."""


class ChildExited(RedlineError):
    """The child ended without an answer. `code` is its exit code, negative for a signal, or None if it is unknown."""

    def __init__(self, message: str, code: int | None) -> None:
        super().__init__(message)
        self.code = code


class Process(Protocol):
    """The part of `subprocess.Popen` that a `Child` needs."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...


class Child:
    """The parent's side of a child process; `process` is None if it was started on another machine.

    `log` is the file that collects the child's stderr, whose last line explains a crash.
    """

    def __init__(
        self, name: str, connection: Connection, process: Process | None = None, log: Path | None = None
    ) -> None:
        self.name, self.connection, self.process, self.log = name, connection, process, log

    def request(self, message: object, timeout_s: float) -> Any:
        """Sends a message and returns the answer. Raises ChildTimeout or ChildExited if there is no answer."""
        try:
            self.connection.send(message)
            if self.connection.poll(timeout_s):
                return self.connection.recv()
        except (EOFError, OSError):
            # Waits, because the connection closes a moment before the process ends.
            code = self.stop(grace_s=2.0)
            raise ChildExited(self.describe_exit(code), code) from None
        self.stop()
        raise ChildTimeout(f"no result within {timeout_s:.0f} s; it was stopped")

    def stop(self, grace_s: float = 0.0) -> int | None:
        """Closes the connection, waits `grace_s` for the child to end, then kills its group. Returns the exit code."""
        with suppress(OSError):
            self.connection.close()
        if self.process is None:
            return None
        running = self._wait(grace_s) is None
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        if running:  # the child may not have created its process group yet
            with suppress(ProcessLookupError, PermissionError):
                os.kill(self.process.pid, signal.SIGKILL)
        return self._wait(_KILL_S)

    def terminate(self) -> None:
        """Asks the child to end, by SIGTERM."""
        if self.process is not None and self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGTERM)

    def describe_exit(self, code: int | None) -> str:
        """Returns a sentence about how the child ended, with the last line of its log."""
        line = "" if self.log is None else last_line(self.log)
        last = f": {line[:200]}" if line else ""
        if code is None:
            return f"{self.name} closed its connection{last}"
        if code < 0:
            hint = " (out of memory?)" if code == -signal.SIGKILL else ""
            return f"{self.name} died of {signal.Signals(-code).name}{hint}{last}"
        return f"{self.name} ended with exit code {code}{last}"

    def _wait(self, timeout_s: float) -> int | None:
        assert self.process is not None
        deadline = time.monotonic() + timeout_s
        while (code := self.process.poll()) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return code


def last_line(log: Path) -> str:
    """Returns the last line of a log that is not blank, or an empty string."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else ""


def start_module(
    module: str,
    *arguments: str,
    environment: Mapping[str, str],
    stdout: int | IO[bytes] = subprocess.DEVNULL,
    stderr: IO[bytes] | None = None,
) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Runs `python -m module FD ARGUMENTS…` and returns the other end of the socket whose file descriptor is FD."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(theirs.fileno()), *arguments],
            env=dict(environment),
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            process_group=0,
        )
    return ours, process

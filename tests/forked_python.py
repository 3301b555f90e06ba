"""Runs programs in forks of a Python process that has imported torch; importing it takes 2 CPU s.

A program that reads environment variables of torch, or that is about its import, needs a process of its own.
"""

import gc
import importlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from patience import PATIENCE_S

# Runs the command line as `python -m redline` does.
COMMAND_LINE = "import runpy; runpy.run_module('redline', run_name='__main__', alter_sys=True)"


class ForkedPython:
    """A context manager around the process that forks, which has imported torch and these modules."""

    def __init__(self, *modules: str) -> None:
        self._modules = modules

    def __enter__(self) -> "ForkedPython":
        self._control, theirs = socket.socketpair()
        with theirs:
            words = [sys.executable, __file__, str(theirs.fileno()), *self._modules]
            self._process = subprocess.Popen(words, pass_fds=[theirs.fileno()])
        self._answers = self._control.makefile("rb")
        return self

    def __exit__(self, *_: object) -> None:
        self._answers.close()
        self._control.close()
        self._process.wait()

    def run(
        self, code: str, *arguments: object, cwd: Path | None = None, stdout: int | IO[Any] | None = None
    ) -> "subprocess.CompletedProcess[str]":
        """Runs `python -c code arguments` in this process's environment. `stdout` replaces the output returned."""
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
            process = self.start(code, *arguments, cwd=cwd, stdout=out if stdout is None else stdout, stderr=errors)
            exit_code = process.wait()
            out.seek(0)
            errors.seek(0)
            return subprocess.CompletedProcess(["-c", *map(str, arguments)], exit_code, out.read(), errors.read())

    def start(
        self,
        code: str,
        *arguments: object,
        stdout: int | IO[Any],
        stderr: int | IO[Any],
        cwd: Path | None = None,
        environment: Mapping[str, str] = os.environ,
        descriptor: int | None = None,
    ) -> "ForkedProcess":
        """Starts `python -c code arguments` in a process group of its own; an open file comes as its first argument."""
        asked = {"code": code, "arguments": list(map(str, arguments)), "cwd": str(cwd or Path.cwd())}
        passed = [given if isinstance(given, int) else given.fileno() for given in (stdout, stderr)]
        passed += [] if descriptor is None else [descriptor]
        return ForkedProcess(self, self._ask({**asked, "environment": dict(environment)}, *passed))

    def start_module(
        self, module: str, *arguments: str, environment: Mapping[str, str]
    ) -> "tuple[socket.socket, ForkedProcess]":
        """Replaces `redline.machine.processes.start_module` for a module with a function `main`."""
        code = f"import {module} as module; module.main()"
        ours, theirs = socket.socketpair()
        with theirs, Path(os.devnull).open("w") as nothing:
            words = {"stdout": nothing, "stderr": nothing, "environment": environment}
            return ours, self.start(code, *arguments, descriptor=theirs.fileno(), **words)

    def _ask(self, request: dict[str, Any], *descriptors: int) -> Any:
        data = json.dumps(request).encode()
        socket.send_fds(self._control, [b"%10d" % len(data)], descriptors)
        self._control.sendall(data)
        return json.loads(self._answers.readline())


class ForkedProcess:
    """The part of `subprocess.Popen` that tests need."""

    def __init__(self, parent: ForkedPython, pid: int) -> None:
        self._parent, self.pid = parent, pid
        self.returncode: int | None = None

    def wait(self) -> int:
        deadline = time.monotonic() + PATIENCE_S
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                self.kill()
                raise TimeoutError(f"process {self.pid} has not ended after {PATIENCE_S} s")
            time.sleep(0.005)
        return code

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._parent._ask({"pid": self.pid})
        return self.returncode

    def kill(self) -> None:
        """Kills the process if it is still running."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    for module in ("torch", *sys.argv[2:]):
        importlib.import_module(module)
    gc.freeze()
    while True:
        size, passed, _, _ = socket.recv_fds(control, 10, 3)
        if not size:
            return
        request = b""
        while len(request) < int(size):
            request += control.recv(int(size) - len(request))
        asked = json.loads(request)
        if "pid" in asked:
            found, status = os.waitpid(asked["pid"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if found else None
        else:
            answer = os.fork()
            if not answer:
                control.close()
                break
        for descriptor in passed:
            os.close(descriptor)
        control.sendall(json.dumps(answer).encode() + b"\n")
    os.setpgid(0, 0)
    out, errors, *others = passed
    for number, output in ((1, out), (2, errors)):
        os.dup2(output, number)
        os.close(output)
    # Those that Python opened belong to other files.
    outputs = (io.BufferedWriter(io.FileIO(number, "w", closefd=False)) for number in (1, 2))
    sys.stdout = sys.__stdout__ = io.TextIOWrapper(next(outputs))
    sys.stderr = sys.__stderr__ = io.TextIOWrapper(next(outputs), line_buffering=True)
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.chdir(asked["cwd"])
    # As `python -c` does: the folder of this file is no place to import from, the current one is.
    sys.path[0], sys.argv = "", ["-c", *map(str, others), *asked["arguments"]]
    exec(compile(asked["code"], "<string>", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    main()

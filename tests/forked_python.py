"""Runs programs in forks of a Python process that has imported torch and nothing else; importing it takes 2 CPU s.

A program that reads environment variables of torch, or that is about its import, needs a process of its own.
"""

import gc
import io
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Any

# Runs the command line as `python -m redline` does.
COMMAND_LINE = "import runpy; runpy.run_module('redline', run_name='__main__', alter_sys=True)"


class ForkedPython:
    """A context manager around the process that forks."""

    def __enter__(self) -> "ForkedPython":
        self._control, theirs = socket.socketpair()
        with theirs:
            words = [sys.executable, __file__, str(theirs.fileno())]
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
        asked = {"code": code, "argv": ["-c", *map(str, arguments)], "cwd": str(cwd or Path.cwd())}
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
            given = out if stdout is None else stdout
            outputs = [given if isinstance(given, int) else given.fileno(), errors.fileno()]
            request = json.dumps({**asked, "environment": dict(os.environ)}).encode()
            socket.send_fds(self._control, [b"%10d" % len(request)], outputs)
            self._control.sendall(request)
            code_line = self._answers.readline()
            out.seek(0)
            errors.seek(0)
            return subprocess.CompletedProcess(asked["argv"], int(code_line), out.read(), errors.read())


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    import torch  # noqa: F401

    gc.freeze()
    while True:
        size, outputs, _, _ = socket.recv_fds(control, 10, 2)
        if not size:
            return
        request = b""
        while len(request) < int(size):
            request += control.recv(int(size) - len(request))
        pid = os.fork()
        if not pid:
            control.close()
            break
        for output in outputs:
            os.close(output)
        control.sendall(b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    for number, output in enumerate(outputs, 1):
        os.dup2(output, number)
        os.close(output)
    # Those that Python opened belong to other files.
    out, errors = (io.BufferedWriter(io.FileIO(number, "w", closefd=False)) for number in (1, 2))
    sys.stdout = sys.__stdout__ = io.TextIOWrapper(out)
    sys.stderr = sys.__stderr__ = io.TextIOWrapper(errors, line_buffering=True)
    asked = json.loads(request)
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.chdir(asked["cwd"])
    # As `python -c` does: the folder of this file is no place to import from, the current one is.
    sys.path[0], sys.argv = "", asked["argv"]
    exec(compile(asked["code"], "<string>", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    main()

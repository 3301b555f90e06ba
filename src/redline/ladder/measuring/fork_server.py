"""The parent of all workers: imports torch once, then forks a child for each request.

Each trial needs a process of its own, because only the end of a process undoes every effect of a rung. Importing torch
takes seconds; forking a process that has imported it takes milliseconds. This process must not start CUDA or threads.
"""

import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any


def _preload() -> None:
    import torch  # noqa: F401
    import torch._dynamo  # noqa: F401

    import redline.ladder.measuring.worker  # noqa: F401

    gc.freeze()  # keeps the garbage collector of a child from writing to shared pages, which would copy them


def _import(modules: list[str]) -> None:
    """Imports the modules that a worker imported for its model, so that later workers do not need time for that."""
    for name in modules:
        with contextlib.suppress(Exception, SystemExit):
            importlib.import_module(name)
    gc.freeze()


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    # Ignores signals, because the parent process decides when workers end, even if all processes get a signal.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _preload()
    control.sendall(b"ready\n")
    while True:
        # Several requests may arrive at once: after an interrupt the parent may not have read the last answer.
        requests, descriptors, _, _ = socket.recv_fds(control, 65536, 2)
        if not requests:
            return
        for line in requests.splitlines():
            number, request = json.loads(line)
            answer = _answer(request, control, descriptors)
            control.sendall(json.dumps([number, answer]).encode() + b"\n")


def _answer(request: dict[str, Any], control: socket.socket, descriptors: list[int]) -> int | None:
    if "status" in request:
        return _exit_code(request["status"])
    if "modules" in request:
        return _import(json.loads(Path(request["modules"]).read_text()))
    channel, log = descriptors
    pid = os.fork()
    if pid == 0:
        control.close()
        _become_worker(channel, log)
    os.close(channel)
    os.close(log)
    return pid


def _exit_code(pid: int) -> int | None:
    """Returns the exit code of a child, negative for a signal, or None while it runs."""
    try:
        found, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return 0
    return os.waitstatus_to_exitcode(status) if found else None


def _become_worker(channel: int, log: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.setsid()  # so that a hung worker can be killed together with the compilers that it started
    # If the machine runs out of memory, the kernel should end a worker and its compilers, not other programs.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("800")
    os.dup2(log, 1)
    os.dup2(log, 2)
    import torch

    from redline.ladder.measuring.worker import serve

    code = 1
    try:
        if torch.cuda._is_in_bad_fork():
            # An imported module started CUDA, which does not survive a fork: start a new interpreter, which is slower.
            os.set_inheritable(channel, True)
            os.execv(sys.executable, [sys.executable, "-m", "redline.ladder.measuring.worker", str(channel)])
        serve(channel)
        code = 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()

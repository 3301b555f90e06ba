"""The processes that work on an upscaling: started, listened to, and ended with nothing left behind.

Each has a connection of its own and no lock is shared, so that one that is killed takes nothing with it: its
connection ends, and that is heard. They are not in the terminal's process group: Ctrl-C reaches the parent alone.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from redline.files.partial import is_partial
from redline.machine.cores import cores
from redline.machine.machine import resolve_device
from redline.upscale.tasks import Task
from redline.upscale.workers.messages import Failed

# How long a worker may take to clear up when it is asked to end.
_GRACE_S = 10.0


class Member:
    """One worker as its parent sees it; `process` is None for one that was started elsewhere."""

    def __init__(self, name: str, connection: Connection, process: subprocess.Popen[bytes] | None = None) -> None:
        self.name, self.connection, self.process = name, connection, process
        self.failure = ""
        self._folders: set[Path] = set()

    def give(self, task: Task | None) -> None:
        if task is not None:
            self._folders.add(task.target.parent)
        self.send(task)

    def send(self, message: object) -> None:
        """To one that is gone nothing is sent; the crew's `messages` tell of it."""
        with contextlib.suppress(OSError):
            self.connection.send(message)

    def why_gone(self) -> str:
        """How it ended; its connection has ended already."""
        code = _end(self.process, _GRACE_S) if self.process is not None else None
        if self.failure:
            return f"{self.name}: {self.failure.rstrip('.')}"
        if code is None:
            return f"{self.name} is gone"
        if code < 0:
            name = signal.Signals(-code).name
            return f"{self.name} died of {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
        return f"{self.name} ended with code {code}"

    def sweep(self) -> None:
        """Removes what it left half written; of a worker elsewhere nothing is known that would tell its files apart."""
        if self.process is None:
            return
        for folder in self._folders:
            for path in folder.glob(f".*.{self.process.pid}.*"):
                if is_partial(path) and path.is_file():
                    path.unlink(missing_ok=True)


def _end(process: subprocess.Popen[bytes], grace_s: float) -> int:
    try:
        return process.wait(grace_s)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


class Crew:
    """A context manager around the members; at its end none of them is left."""

    def __init__(self, members: Sequence[Member]) -> None:
        self.members = list(members)

    def __len__(self) -> int:
        return len(self.members)

    def __enter__(self) -> "Crew":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for member in self.members:
            member.connection.close()  # which tells it to end
            if kind is not None and member.process is not None:
                member.process.terminate()
        deadline = time.monotonic() + _GRACE_S
        for member in self.members:
            if member.process is not None:
                _end(member.process, max(deadline - time.monotonic(), 0.1))
                member.sweep()
        self.members.clear()

    def messages(self) -> Iterator[tuple[Member, Any]]:
        """What the members send, as it comes; None from one that is gone, which is a member no more."""
        while self.members:
            by_connection = {member.connection: member for member in self.members}
            for connection in wait(list(by_connection)):
                assert isinstance(connection, Connection)
                member = by_connection[connection]
                try:
                    message = connection.recv()
                except (EOFError, OSError):
                    member.connection.close()
                    self.members.remove(member)
                    message = None
                if isinstance(message, Failed):
                    member.failure = message.sentence  # its end follows
                else:
                    yield member, message


def worker_devices(device: str = "auto", workers: int | None = None) -> list[str]:
    """The device of each worker: one a GPU by default; more workers than GPUs share them, and the CPU."""
    one = resolve_device(device)
    several = one.startswith("cuda") and device in ("auto", "cuda")
    devices = [f"cuda:{index}" for index in range(torch.cuda.device_count())] if several else [one]
    return [devices[index % len(devices)] for index in range(workers or len(devices))]


def start_crew(devices: Sequence[str]) -> Crew:
    """A worker for each device, which may be named more than once."""
    crew = Crew([])
    try:
        for index, device in enumerate(devices):
            name = f"the worker on {device}" if devices.count(device) == 1 else f"worker {index + 1} on {device}"
            crew.members.append(start_member(name, device, devices.count(device), len(devices)))
    except BaseException as error:
        crew.__exit__(type(error))
        raise
    return crew


def start_member(name: str, device: str, sharing: int, workers: int) -> Member:
    """Starts one of `workers` processes here, of which `sharing` use the memory of this device."""
    ours, theirs = socket.socketpair()
    environment = {"OMP_NUM_THREADS": str(max(cores() // workers, 1)), **os.environ}
    command = [sys.executable, "-m", "redline.upscale.workers.worker", str(theirs.fileno()), device, str(sharing)]
    with theirs:
        process = subprocess.Popen(
            command,
            env=environment,
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            process_group=0,
        )
    return Member(name, Connection(ours.detach()), process)

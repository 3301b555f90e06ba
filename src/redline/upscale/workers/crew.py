"""The worker processes of an upscaling run and their messages. Starts workers, and cleans up when they end."""

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from redline.files.partial import is_partial
from redline.machine.cores import cores
from redline.machine.machine import resolve_device
from redline.machine.processes import Child, Process, start_module
from redline.upscale.settings import Tiles, TileSizes, UpscaleSettings
from redline.upscale.tasks import Task

# How long a worker may take to clean up when it is asked to end.
_GRACE_S = 10.0


@dataclass(frozen=True)
class Job:
    """The parent's first message: the settings, and the image sizes from which the worker proposes a tile size.

    Every worker calibrates its plan on the first tiles of the images in `samples`, so that all have the same plan.
    """

    settings: UpscaleSettings
    samples: tuple[Task, ...]
    tiles: Tiles | None
    sizes: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Proposal:
    """A worker's answer: the tile sizes and batch size that fit its memory, and its plan and weights.

    The parent answers with the `Tiles` that all workers use, because different tiles would give different pixels.
    """

    tiles: TileSizes
    batch: int
    plan: str
    digest: str


@dataclass(frozen=True)
class Ask:
    """A worker asks for a task and waits for one. With `at_once`, it immediately gets an image task or None."""

    at_once: bool


@dataclass(frozen=True)
class ListenerCall:
    """A call of a function of the worker's listener, which the parent repeats with its own listener."""

    function: str
    arguments: tuple[object, ...]


@dataclass(frozen=True)
class Failed:
    """A worker's last message: why it cannot run any task, for example because a single tile does not fit in memory."""

    sentence: str


class Member(Child):
    """One worker as its parent sees it; `process` is None for a rank of torchrun, which was started elsewhere."""

    def __init__(self, name: str, connection: Connection, process: Process | None = None) -> None:
        super().__init__(name, connection, process)
        self.failure = ""
        self._folders: set[Path] = set()

    def give(self, task: Task | None) -> None:
        if task is not None:
            self._folders.add(task.target.parent)
        self.send(task)

    def send(self, message: object) -> None:
        """Sends a message. Does nothing if the worker has ended, because `Crew.messages` reports that."""
        with contextlib.suppress(OSError):
            self.connection.send(message)

    def why_gone(self) -> str:
        """Ends a worker whose connection is closed, and returns a sentence about the cause."""
        code = self.stop(_GRACE_S)
        return f"{self.name}: {self.failure.rstrip('.')}" if self.failure else self.describe_exit(code)

    def remove_partial_files(self) -> None:
        """Removes the partial files of a local worker; those of a rank of torchrun cannot be told from other files."""
        if self.process is None:
            return
        for folder in self._folders:
            for path in folder.glob(f".*.{self.process.pid}.*"):
                if is_partial(path) and path.is_file():
                    path.unlink(missing_ok=True)


class Crew(contextlib.AbstractContextManager["Crew"]):
    """The workers of a run; as a context manager, it ends them on exit."""

    def __init__(self, members: Sequence[Member]) -> None:
        self.members = list(members)

    def __len__(self) -> int:
        return len(self.members)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for member in self.members:
            member.connection.close()  # a worker ends when its connection closes
            if kind is not None:
                member.terminate()
        deadline = time.monotonic() + _GRACE_S
        for member in self.members:
            member.stop(max(deadline - time.monotonic(), 0.1))
            member.remove_partial_files()
        self.members.clear()

    def messages(self) -> Iterator[tuple[Member, Any]]:
        """Yields the members' messages as they arrive, and None for a member that has ended, which it removes."""
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
                    member.failure = message.sentence  # the worker ends after this message
                else:
                    yield member, message


def worker_devices(device: str = "auto", workers: int | None = None) -> list[str]:
    """Returns the device of each worker: by default one per GPU, or one on the CPU. More workers share the devices."""
    one = resolve_device(device)
    several = one.startswith("cuda") and device in ("auto", "cuda")
    devices = [f"cuda:{index}" for index in range(torch.cuda.device_count())] if several else [one]
    return [devices[index % len(devices)] for index in range(workers or len(devices))]


def start_crew(devices: Sequence[str]) -> Crew:
    """Starts a worker for each device, which may be listed more than once."""
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
    """Starts one of `workers` local processes. `sharing` of them use this device and share its memory."""
    environment = {"OMP_NUM_THREADS": str(max(cores() // workers, 1)), **os.environ}
    channel, process = start_module("redline.upscale.workers.worker", device, str(sharing), environment=environment)
    return Member(name, Connection(channel.detach()), process)

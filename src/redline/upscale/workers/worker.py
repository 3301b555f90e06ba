"""The code of a worker process: asks its parent for images and videos until there are no more.

The parent ends a worker by closing the connection, at any time; partial files are then deleted, as after Ctrl-C.
"""

import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from multiprocessing.connection import Connection
from threading import Lock
from typing import Any

import torch

from redline.errors import RedlineError
from redline.upscale.image_run import ImageRun
from redline.upscale.session import Upscaling
from redline.upscale.settings import Tiles
from redline.upscale.tasks import Listener, Task
from redline.upscale.workers.crew import Ask, Failed, Job, ListenerCall, Proposal


class ParentGone(Exception):
    """Raised when the connection to the parent has ended."""


class ParentConnection:
    """The connection to the parent. Several threads may send; only one may receive."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._sending = connection, Lock()

    def send(self, message: object) -> None:
        try:
            with self._sending:
                self._connection.send(message)
        except OSError as error:
            raise ParentGone from error

    def receive(self) -> Any:
        try:
            return self._connection.recv()
        except (EOFError, OSError) as error:
            raise ParentGone from error

    def listener(self) -> Listener:
        """Returns a listener that forwards its calls to the parent."""

        def forward(function: str, *arguments: object) -> None:
            self.send(ListenerCall(function, arguments))

        names = ("say", "finished", "image_progress", "video_progress")
        return Listener(**{name: partial(forward, name) for name in names})

    def ask(self) -> Task:
        self.send(Ask(at_once=False))
        return self.receive()

    def images(self) -> Iterator[Task]:
        """Yields the image tasks that are waiting, and then ends, so that the caller finishes images in progress."""
        self.send(Ask(at_once=True))
        while (task := self.receive()) is not None:
            yield task
            self.send(Ask(at_once=True))


def serve(connection: Connection, device: str, sharing: int = 1) -> None:
    """Works until the parent closes the connection. `sharing` workers share the memory of the device."""
    signal.signal(signal.SIGTERM, _interrupt)
    parent = ParentConnection(connection)
    try:
        _work(parent, device, sharing)
    except RedlineError as error:
        parent.send(Failed(str(error)))


def _work(parent: ParentConnection, device: str, sharing: int) -> None:
    if device.startswith("cuda"):
        torch.cuda.set_device(device)  # otherwise every worker would also use memory of the first GPU
    job: Job = parent.receive()
    upscaling = Upscaling(replace(job.settings, device=device, workers=1), parent.listener())
    tiling, batch = upscaling.planner.choose(job.sizes, job.tiles, sharing)
    parent.send(Proposal(tiling.sizes, batch, str(upscaling.plan), upscaling.network.digest))
    tiles: Tiles = parent.receive()
    tile_runner = upscaling.make_tile_runner(upscaling.planner.tiling(tiles.sizes, tiles.batch or 1), tiles.batch or 1)
    tell = upscaling.listener.finished

    def run() -> ImageRun:
        return ImageRun(tile_runner, job.settings.images, tell, upscaling.listener.image_progress)

    if tile_runner.plan.rungs:
        run().prepare(job.samples)
    while True:
        task = parent.ask()
        if task.is_video:
            tell(upscaling.upscale_video_task(task, tile_runner))
        else:
            run().run(chain([task], parent.images()))


def _interrupt(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second signal would interrupt the cleanup
    raise KeyboardInterrupt


def main() -> None:
    channel, device, sharing = sys.argv[1:]
    try:
        serve(Connection(int(channel)), device, int(sharing))
    except (ParentGone, KeyboardInterrupt):
        return


if __name__ == "__main__":
    main()

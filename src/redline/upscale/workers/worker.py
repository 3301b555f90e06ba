"""What runs inside a worker process: asks its parent for pictures and films until there are no more.

The parent ends it by closing the connection, whatever it is doing; a half-written file goes then, as after Ctrl-C.
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
from redline.upscale.listener import Listener, Outcome
from redline.upscale.session import Upscaling
from redline.upscale.tasks import Task
from redline.upscale.workers.messages import Agreed, Ask, Failed, Heard, Job, Proposal


class Gone(Exception):
    """The parent is no longer there."""


class Line:
    """The connection to the parent; any thread may send, one at a time receives."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._sending = connection, Lock()

    def send(self, message: object) -> None:
        try:
            with self._sending:
                self._connection.send(message)
        except OSError as error:
            raise Gone from error

    def receive(self) -> Any:
        try:
            return self._connection.recv()
        except (EOFError, OSError) as error:
            raise Gone from error

    def listener(self) -> Listener:
        def hear(what: str, *arguments: object) -> None:
            self.send(Heard(what, arguments))

        names = ("say", "finished", "image_progress", "video_progress")
        return Listener(**{name: partial(hear, name) for name in names})

    def ask(self) -> Task:
        self.send(Ask(at_once=False))
        return self.receive()

    def pictures(self) -> Iterator[Task]:
        """Pictures as long as there are some; then what is under way is finished before anything is waited for."""
        while True:
            self.send(Ask(at_once=True))
            task = self.receive()
            if task is None:
                return
            yield task


def serve(connection: Connection, device: str, sharing: int = 1) -> None:
    """Works until the parent hangs up; `sharing` workers use the memory of the device."""
    signal.signal(signal.SIGTERM, _interrupt)
    line = Line(connection)
    try:
        _work(line, device, sharing)
    except RedlineError as error:
        line.send(Failed(str(error)))


def _work(line: Line, device: str, sharing: int) -> None:
    if device.startswith("cuda"):
        torch.cuda.set_device(device)  # so that nothing is set up on the first GPU by every worker
    job: Job = line.receive()
    upscaling = Upscaling(replace(job.settings, device=device, workers=1), line.listener())
    tiling, batch = upscaling.choose_tiles(job.sizes, job.tiles, sharing)
    line.send(Proposal(tiling.sizes, batch, str(upscaling.plan), upscaling.network.digest))
    agreed: Agreed = line.receive()
    tile_runner = upscaling.make_tile_runner(upscaling.tiling(agreed.tiles, agreed.batch), agreed.batch)

    def tell(outcome: Outcome) -> None:
        upscaling.listener.finished(outcome)

    def run() -> ImageRun:
        return ImageRun(tile_runner, job.settings.images, tell, upscaling.listener.image_progress)

    if tile_runner.plan.rungs:
        run().prepare(job.samples)
    while True:
        task = line.ask()
        if task.is_video:
            tell(upscaling.upscale_video_task(task, tile_runner))
        else:
            run().run(chain([task], line.pictures()))


def _interrupt(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once: a second one would interrupt the tidying up
    raise KeyboardInterrupt


def main() -> None:
    channel, device, sharing = sys.argv[1:]
    try:
        serve(Connection(int(channel)), device, int(sharing))
    except (Gone, KeyboardInterrupt):
        return


if __name__ == "__main__":
    main()

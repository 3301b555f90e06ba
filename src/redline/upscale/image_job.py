"""The state of one image while it is upscaled: its source and sink, its tiles, and its progress."""

import time

import numpy as np
import torch

from redline.errors import RedlineError
from redline.upscale.blend import Blender
from redline.upscale.images.formats import check_can_hold, format_for
from redline.upscale.images.sink import ImageSink
from redline.upscale.images.source import ImageSource, open_image
from redline.upscale.memory_images import ArraySink, ArraySource, ArrayTask
from redline.upscale.settings import ImageSettings
from redline.upscale.tasks import Outcome, Task
from redline.upscale.tile_runner import TileRunner
from redline.upscale.tiling import PaddedSide, pad_side
from redline.upscale.workers.split_image import Part, PartSink, first_needed


class ImageJob:
    """One image: opened by the thread that reads, blended by the one that computes, written by the one that writes."""

    def __init__(self, task: Task, tile_runner: TileRunner, settings: ImageSettings) -> None:
        self.task = task
        # Taken before the file is opened, so that a file that is replaced in between is detected as changed.
        self.source_state = task.source_state()
        # The time when work on the image began; None while the image waits in the queue.
        self.started: float | None = None
        self.source = _open_source(task, settings)
        self.scale = tile_runner.network.scale
        self.width, self.height = self.scale * self.source.width, self.scale * self.source.height
        self.channels, self.bits = self.source.channels, self.source.bits
        if not isinstance(task, ArrayTask):
            # Checked before any work is done.
            check_can_hold(format_for(task.target), self.width, self.height, self.channels, self.bits)
        shape = tile_runner.tiling.shape_for((self.source.width, self.source.height), settings.wrap)
        self.rows: PaddedSide = pad_side(self.source.height, shape.rows, settings.wrap)
        self.columns: PaddedSide = pad_side(self.source.width, shape.columns, settings.wrap)
        self.blender = Blender(self.rows.side, self.columns.side, self.scale, tile_runner.device)
        # The rows of tiles to write, and the row from which they have to be computed.
        self.first, self.last = (task.first, task.last) if isinstance(task, Part) else (0, len(self.rows.side.starts))
        self.begin = first_needed(self.rows.side, self.first, self.scale)
        self.sink: ImageSink | PartSink | ArraySink | None = None
        self.error = ""
        # If set, no more rows are read or computed. The thread that writes reports the error.
        self.has_failed = False
        self.in_main_memory = False

    @property
    def band_pixels(self) -> int:
        """The number of pixels of one row of tiles, which is blended as a whole."""
        return self.rows.side.cut.tile * self.columns.side.padded

    def blend_in_main_memory(self) -> None:
        self.in_main_memory, self.blender.device = True, torch.device("cpu")

    def band(self, row: int) -> np.ndarray:
        top = self.rows.side.starts[row]
        positions = self.rows.positions_on("cpu")[top : top + self.rows.side.cut.tile]
        first, last = int(positions.min()), int(positions.max())
        return self.source.rows(first, last + 1)[(positions - first).numpy()]

    def inside(self, row: int) -> slice:
        """Returns the slice of the rows finished by a row of tiles that belongs to the image, or to this part of it."""
        if row < self.first:
            return slice(0, 0)
        begin, count = self.rows.side.starts[row] * self.scale, self.blender.finished_rows(row)
        whole = self.rows.inside(self.scale)
        return slice(max(whole.start - begin, 0), max(min(whole.stop - begin, count), 0))

    def outcome(self, error: str = "") -> Outcome:
        notes = (*self.source.notes, *(self.sink.notes if self.sink else ()))
        seconds = time.monotonic() - self.started if self.started is not None else 0.0
        return Outcome(self.task, self.width, self.height, seconds, notes, error, source_state=self.source_state)


def _open_source(task: Task, settings: ImageSettings) -> ImageSource | ArraySource:
    if isinstance(task, ArrayTask):
        return ArraySource(task.samples)
    if task.target.exists() and task.target.samefile(task.source):
        raise RedlineError(f"the output {str(task.target)!r} is the source image; choose another output.")
    return open_image(task.source, settings.pixel_limit, random_access=settings.wrap)

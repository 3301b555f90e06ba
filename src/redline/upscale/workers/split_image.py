"""Splits a large image into parts for several workers, and assembles the results.

A part is a range of rows of tiles. Every output row is blended from the same tiles in the same order as by a single
worker, so the assembled image has the same bytes. For that, a part also computes the tiles above it that overlap it.
The finished rows of each part go to a temporary file.
"""

import contextlib
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from redline.errors import RedlineError
from redline.files.partial import hidden_path
from redline.upscale.images.formats import ImageError
from redline.upscale.images.sink import ImageSink
from redline.upscale.images.source import ImageSource, open_image
from redline.upscale.settings import ImageSettings, UpscaleSettings
from redline.upscale.tasks import Outcome, Task
from redline.upscale.tiling import Side, Tiling, cut_side

# The minimum number of rows of tiles per part: each part computes about one extra row, so small parts waste work.
_MIN_ROWS = 2
_BYTES_AT_ONCE = 16 * 2**20


@dataclass(frozen=True)
class Part(Task):
    """The rows of tiles from `first` to `last` − 1 of an image; their pixels go to the file `rows`."""

    first: int
    last: int
    rows: Path

    @property
    def whole(self) -> Task:
        return Task(self.source, self.target)


class PartSink:
    """Writes the rows of a part to its file, uncompressed, with the interface of an image sink."""

    notes: tuple[str, ...] = ()

    def __init__(self, part: Part) -> None:
        self._part = part
        with self._explaining():
            self._file = part.rows.open("wb")

    def write_rows(self, rows: np.ndarray) -> None:
        with self._explaining():
            self._file.write(np.ascontiguousarray(rows).data)

    def finish(self) -> None:
        with self._explaining():
            self._file.close()

    def abort(self) -> None:
        """Closes the file, which is deleted with the folder of all parts."""
        with contextlib.suppress(OSError):
            self._file.close()

    @contextlib.contextmanager
    def _explaining(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ImageError(f"cannot write {str(self._part.target)!r}: {error.strerror or error}.") from error


@dataclass(eq=False)
class Split:
    """An image that is split into parts, and the progress of the parts."""

    task: Task
    folder: Path
    parts: tuple[Part, ...]
    source_state: tuple[int, int] | None = None
    started: float = field(default_factory=time.monotonic)
    unfinished: set[Part] = field(default_factory=set)
    rows_done: dict[Part, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    error: str = ""

    def assemble(self, settings: ImageSettings, scale: int) -> Outcome:
        """Writes the image from its parts, and deletes their files, also after an error."""
        try:
            if self.error:
                return Outcome(self.task, error=self.error)
            with open_image(self.task.source, settings.max_pixels) as source:
                width, height = scale * source.width, scale * source.height
                shape = (width, height, source.channels, source.bits)
                with ImageSink(self.task.target, *shape, settings.encoding, source.metadata, settings.strip) as sink:
                    for part in self.parts:
                        for rows in _read_rows(part.rows, width, source):
                            sink.write_rows(rows)
                        part.rows.unlink()
            notes = (*source.notes, *self.notes, *sink.notes)
            seconds, told = time.monotonic() - self.started, tuple(dict.fromkeys(notes))
            return Outcome(self.task, width, height, seconds, told, source_state=self.source_state)
        except (RedlineError, OSError) as error:
            return Outcome(self.task, error=str(error))
        finally:
            self.discard()

    def discard(self) -> None:
        """Deletes the files of the parts."""
        shutil.rmtree(self.folder, ignore_errors=True)


def is_large(task: Task, settings: UpscaleSettings) -> bool:
    """Returns whether the task is an image that is large enough to split; False if it cannot be read."""
    if task.is_video:
        return False
    try:
        with open_image(task.source, settings.images.max_pixels) as image:
            return image.width * image.height > settings.split_pixels
    except RedlineError:
        return False


def split(task: Task, count: int, settings: UpscaleSettings, tiling: Tiling, scale: int) -> Split | None:
    """Splits an image into at most `count` parts; returns None if it should stay whole."""
    state = task.source_state()
    try:
        with open_image(task.source, settings.images.max_pixels) as image:
            width, height = image.width, image.height
            pixels = width * height
            raw_bytes = pixels * scale**2 * image.channels * (image.bits // 8)
        cut = tiling.shape_for((width, height), settings.images.wrap).rows
        rows = len(cut_side(height, cut, settings.images.wrap).starts)
        count = min(count, rows // _MIN_ROWS)
        if pixels <= settings.split_pixels or count < 2:
            return None
        task.target.parent.mkdir(parents=True, exist_ok=True)
        # The disk must have room for the parts and the image at the same time.
        if shutil.disk_usage(task.target.parent).free < 2 * raw_bytes:
            return None
        folder = hidden_path(task.target)
        folder.mkdir(mode=0o700)
    except (RedlineError, OSError):
        return None  # the worker that gets the whole image reports the error
    ranges = enumerate(even_ranges(rows, count))
    parts = tuple(Part(task.source, task.target, *bounds, folder / f"{index}.rows") for index, bounds in ranges)
    return Split(task, folder, parts, state, unfinished=set(parts))


def first_needed(side: Side, first: int, scale: int) -> int:
    """Returns the first row of tiles that contributes to the pixels that the row of tiles `first` covers."""
    weights = side.weights(scale)
    for row in range(first):
        if weights[row, (side.starts[first] - side.starts[row]) * scale :].any():
            return row
    return first


def even_ranges(count: int, parts: int) -> list[tuple[int, int]]:
    """Splits 0 … `count` − 1 into `parts` ranges whose lengths differ by at most one."""
    bounds = [index * count // parts for index in range(parts + 1)]
    return list(zip(bounds, bounds[1:], strict=False))


def _read_rows(path: Path, width: int, source: ImageSource) -> Iterator[np.ndarray]:
    kind = np.dtype(np.uint8 if source.bits == 8 else np.uint16)
    row_bytes = width * source.channels * kind.itemsize
    with path.open("rb") as file:
        while data := file.read(max(_BYTES_AT_ONCE // row_bytes, 1) * row_bytes):
            yield np.frombuffer(data, kind).reshape(-1, width, source.channels)

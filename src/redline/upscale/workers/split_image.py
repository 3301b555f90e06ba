"""A large picture shared by several workers: cut into parts of whole rows of tiles, and put together again.

Every row of the result is blended from the same tiles in the same order as when one worker does all of it, so the
parts put together have the same bytes. For that a part also computes the tiles above it that reach into it. A part's
finished rows go into a file of their own.
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
from redline.upscale.images import ImageError, ImageSource, create_image, open_image
from redline.upscale.listener import Outcome
from redline.upscale.padding import pad_side
from redline.upscale.settings import ImageSettings, UpscaleSettings
from redline.upscale.tasks import Task
from redline.upscale.tiling import Side, Tiling

# Each part computes about one row of tiles more than it gives: with fewer rows than this it would be mostly that.
_LEAST_ROWS = 2
_BYTES_AT_ONCE = 16 * 2**20


@dataclass(frozen=True)
class Part(Task):
    """Rows of tiles `first` … `last` − 1 of a picture; their pixels go into `rows`, one after the other."""

    first: int
    last: int
    rows: Path

    @property
    def whole(self) -> Task:
        return Task(self.source, self.target)


class PartSink:
    """Takes a part's rows as a picture's sink would, and writes them as they are."""

    notes: tuple[str, ...] = ()

    def __init__(self, part: Part) -> None:
        self._part = part
        try:
            self._file = part.rows.open("wb")
        except OSError as error:
            raise self._sentence(error) from error

    def write_rows(self, rows: np.ndarray) -> None:
        try:
            self._file.write(np.ascontiguousarray(rows).data)
        except OSError as error:
            raise self._sentence(error) from error

    def finish(self) -> None:
        try:
            self._file.close()
        except OSError as error:
            raise self._sentence(error) from error

    def abort(self) -> None:
        """Its file goes with the folder that holds all parts."""
        with contextlib.suppress(OSError):
            self._file.close()

    def _sentence(self, error: OSError) -> ImageError:
        return ImageError(f"cannot write {str(self._part.target)!r}: {error.strerror or error}.")


@dataclass(eq=False)
class Split:
    """A picture in parts, and what became of them so far."""

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
        """Writes the picture from its parts; in any case their files are gone afterwards."""
        try:
            if self.error:
                return Outcome(self.task, error=self.error)
            with open_image(self.task.source, settings.pixel_limit) as source:
                width, height = scale * source.width, scale * source.height
                shape = (width, height, source.channels, source.bits)
                with create_image(self.task.target, *shape, settings.encoding, source.metadata, settings.strip) as sink:
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
        shutil.rmtree(self.folder, ignore_errors=True)


def is_large(task: Task, settings: UpscaleSettings) -> bool:
    """Whether it is a picture worth sharing; one that cannot be read is not."""
    if task.is_video:
        return False
    try:
        with open_image(task.source, settings.images.pixel_limit) as picture:
            return picture.width * picture.height > settings.split_pixels
    except RedlineError:
        return False


def split(task: Task, count: int, settings: UpscaleSettings, tiling: Tiling, scale: int) -> Split | None:
    """The picture in at most so many parts; None when it is better left whole."""
    state = task.source_state()
    try:
        with open_image(task.source, settings.images.pixel_limit) as picture:
            width, height = picture.width, picture.height
            pixels = width * height
            raw_bytes = pixels * scale**2 * picture.channels * (picture.bits // 8)
        cut = tiling.shape_for((width, height), settings.images.wrap).rows
        rows = len(pad_side(height, cut, settings.images.wrap).side.starts)
        count = min(count, rows // _LEAST_ROWS)
        if pixels <= settings.split_pixels or count < 2:
            return None
        task.target.parent.mkdir(parents=True, exist_ok=True)
        # The parts lie beside what the picture is encoded from, until they are in it.
        if shutil.disk_usage(task.target.parent).free < 2 * raw_bytes:
            return None
        folder = hidden_path(task.target)
        folder.mkdir(mode=0o700)
    except (RedlineError, OSError):
        return None  # whoever gets the whole picture will say what is wrong with it
    ranges = enumerate(even_ranges(rows, count))
    parts = tuple(Part(task.source, task.target, *bounds, folder / f"{index}.rows") for index, bounds in ranges)
    return Split(task, folder, parts, state, unfinished=set(parts))


def first_needed(side: Side, first: int, scale: int) -> int:
    """The first row of tiles that still counts something where row `first` begins."""
    weights = side.weights(scale)
    for row in range(first):
        if weights[row, (side.starts[first] - side.starts[row]) * scale :].any():
            return row
    return first


def even_ranges(count: int, parts: int) -> list[tuple[int, int]]:
    """0 … `count` − 1 in so many ranges that differ by one at most."""
    bounds = [index * count // parts for index in range(parts + 1)]
    return list(zip(bounds, bounds[1:], strict=False))


def _read_rows(path: Path, width: int, source: ImageSource) -> Iterator[np.ndarray]:
    kind = np.dtype(np.uint8 if source.bits == 8 else np.uint16)
    row_bytes = width * source.channels * kind.itemsize
    with path.open("rb") as file:
        while data := file.read(max(_BYTES_AT_ONCE // row_bytes, 1) * row_bytes):
            yield np.frombuffer(data, kind).reshape(-1, width, source.channels)

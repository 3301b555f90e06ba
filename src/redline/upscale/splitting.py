"""A large picture shared by several workers: cut into parts, and put together from what they made."""

import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from redline.errors import RedlineError
from redline.upscale.layout import Cut
from redline.upscale.padding import frame
from redline.upscale.parts import Part, even_ranges
from redline.upscale.pictures import PictureSource, create_picture, open_picture
from redline.upscale.pictures_run import Outcome, PictureSettings
from redline.upscale.settings import UpscaleSettings
from redline.upscale.tasks import Task

# Each part computes about one row of tiles more than it gives: with fewer rows than this it would be mostly that.
_LEAST_ROWS = 2
_BYTES_AT_ONCE = 16 * 2**20


@dataclass(eq=False)
class Split:
    """A picture in parts, and what became of them so far."""

    task: Task
    folder: Path
    parts: tuple[Part, ...]
    started: float = field(default_factory=time.monotonic)
    unfinished: set[Part] = field(default_factory=set)
    rows_done: dict[Part, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    error: str = ""

    def assemble(self, settings: PictureSettings, scale: int) -> Outcome:
        """Writes the picture from its parts; in any case their files are gone afterwards."""
        try:
            if self.error:
                return Outcome(self.task, error=self.error)
            with open_picture(self.task.source, settings.pixel_limit) as source:
                width, height = scale * source.width, scale * source.height
                shape = (width, height, source.channels, source.bits)
                with create_picture(
                    self.task.target, *shape, settings.encoding, source.metadata, settings.strip
                ) as sink:
                    for part in self.parts:
                        for rows in _read_rows(part.rows, width, source):
                            sink.write_rows(rows)
                        part.rows.unlink()
            notes = (*source.notes, *self.notes, *sink.notes)
            return Outcome(self.task, width, height, time.monotonic() - self.started, tuple(dict.fromkeys(notes)))
        except (RedlineError, OSError) as error:
            return Outcome(self.task, error=str(error))
        finally:
            self.discard()

    def discard(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def is_large(task: Task, settings: UpscaleSettings) -> bool:
    """Whether it is a picture worth sharing; one that cannot be read is not."""
    if task.is_film:
        return False
    try:
        with open_picture(task.source, settings.pictures.pixel_limit) as picture:
            return picture.width * picture.height > settings.split_pixels
    except RedlineError:
        return False


def split(task: Task, count: int, settings: UpscaleSettings, cut: Cut, scale: int) -> Split | None:
    """The picture in at most so many parts; None when it is better left whole."""
    try:
        with open_picture(task.source, settings.pictures.pixel_limit) as picture:
            pixels, height = picture.width * picture.height, picture.height
            raw_bytes = pixels * scale**2 * picture.channels * (picture.bits // 8)
        rows = len(frame(height, cut, settings.pictures.wrap).side.starts)
        count = min(count, rows // _LEAST_ROWS)
        if pixels <= settings.split_pixels or count < 2:
            return None
        task.target.parent.mkdir(parents=True, exist_ok=True)
        # The parts lie beside what the picture is encoded from, until they are in it.
        if shutil.disk_usage(task.target.parent).free < 2 * raw_bytes:
            return None
        name = f".{task.target.name[:40]}."
        folder = Path(tempfile.mkdtemp(prefix=name, suffix=".redline-partial", dir=task.target.parent))
    except (RedlineError, OSError):
        return None  # whoever gets the whole picture will say what is wrong with it
    ranges = enumerate(even_ranges(rows, count))
    parts = tuple(Part(task.source, task.target, *bounds, folder / f"{index}.rows") for index, bounds in ranges)
    return Split(task, folder, parts, unfinished=set(parts))


def _read_rows(path: Path, width: int, source: PictureSource) -> Iterator[np.ndarray]:
    kind = np.dtype(np.uint8 if source.bits == 8 else np.uint16)
    row_bytes = width * source.channels * kind.itemsize
    with path.open("rb") as file:
        while data := file.read(max(_BYTES_AT_ONCE // row_bytes, 1) * row_bytes):
            yield np.frombuffer(data, kind).reshape(-1, width, source.channels)

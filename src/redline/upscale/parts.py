"""A part of a large picture: some of its rows of tiles, whose finished rows go into a file of their own.

Every row of the result is blended from the same tiles in the same order as when one worker does all of it, so the
parts put together have the same bytes. For that a part also computes the tiles above it that reach into it.
"""

import contextlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from redline.upscale.layout import Side
from redline.upscale.pictures import PictureError
from redline.upscale.tasks import Task


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

    def _sentence(self, error: OSError) -> PictureError:
        return PictureError(f"cannot write {str(self._part.target)!r}: {error.strerror or error}.")


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

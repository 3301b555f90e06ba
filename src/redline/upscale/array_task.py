"""A task whose source and result are arrays in memory instead of files."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from redline.upscale.images import ImageError, Metadata
from redline.upscale.tasks import Task

_NAME = Path("the image in memory")


@dataclass(frozen=True, eq=False)
class ArrayTask(Task):
    """`samples` is (H, W, 1…4) of uint8 or uint16; the upscaled image is appended to `results`."""

    samples: np.ndarray
    results: list[np.ndarray] = field(default_factory=list)

    @classmethod
    def of(cls, samples: np.ndarray) -> "ArrayTask":
        return cls(_NAME, _NAME, samples)

    @property
    def is_video(self) -> bool:
        return False


class ArraySource:
    """Gives the rows of an array as `ImageSource` gives those of a file."""

    notes: tuple[str, ...] = ()
    metadata = Metadata()

    def __init__(self, samples: np.ndarray) -> None:
        if samples.ndim != 3 or not 1 <= samples.shape[2] <= 4 or samples.dtype not in (np.uint8, np.uint16):
            raise ImageError(f"an array of shape {samples.shape} and dtype {samples.dtype} is not an image.")
        if not samples.size:
            raise ImageError(f"an image of shape {samples.shape} has no pixels.")
        self._samples = samples
        self.height, self.width, self.channels = samples.shape
        self.bits = 8 * samples.dtype.itemsize

    def rows(self, top: int, bottom: int) -> np.ndarray:
        return self._samples[top:bottom]

    def __enter__(self) -> "ArraySource":
        return self

    def __exit__(self, *_: object) -> None:
        return None


class ArraySink:
    """Collects the rows of the result, which `finish` appends to the task's results."""

    notes: tuple[str, ...] = ()

    def __init__(self, task: ArrayTask, width: int, height: int) -> None:
        self._task, self._rows = task, 0
        self._result = np.empty((height, width, task.samples.shape[2]), task.samples.dtype)

    def write_rows(self, rows: np.ndarray) -> None:
        self._result[self._rows : self._rows + len(rows)] = rows
        self._rows += len(rows)

    def finish(self) -> None:
        self._task.results.append(self._result)

    def abort(self) -> None:
        return None

"""Images in memory: converts Pillow images to arrays and back, and defines tasks whose source and result are arrays."""

import logging
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from redline.errors import RedlineError
from redline.upscale.images.formats import ImageError
from redline.upscale.images.metadata import Metadata
from redline.upscale.images.source import open_image
from redline.upscale.tasks import Task

logger = logging.getLogger(__name__)

_DIRECT = ("L", "LA", "RGB", "RGBA")
_CONVERTED = {"1": "L", "P": "RGB", "PA": "RGBA", "La": "LA", "RGBa": "RGBA", "RGBX": "RGB", "CMYK": "RGB"}
_CONVERTED |= {"YCbCr": "RGB", "HSV": "RGB", "LAB": "RGB"}
# Metadata of the source that is also valid for the upscaled image.
_KEPT_INFO = ("icc_profile", "exif", "dpi")
_NAME = Path("the image in memory")


def from_pil(image: Image.Image) -> tuple[np.ndarray, dict[str, Any]]:
    """Returns the samples (H, W, channels) and the metadata to keep; raises `RedlineError` for other modes."""
    info = {name: image.info[name] for name in _KEPT_INFO if name in image.info}
    if image.mode.startswith("I;16"):
        return np.asarray(image).astype(np.uint16)[..., None], info
    mode = image.mode if image.mode in _DIRECT else _CONVERTED.get(image.mode)
    if mode is None:
        raise RedlineError(
            f"images of mode {image.mode!r} are not supported: convert the image to L, LA, RGB, RGBA or I;16."
        )
    if image.mode != mode:
        if mode == "RGB" and "transparency" in image.info:
            mode = "RGBA"
        if image.mode == "CMYK":
            info.pop("icc_profile", None)  # the profile describes CMYK, but the result is RGB
        image = image.convert(mode)
    samples = np.asarray(image)
    return samples if samples.ndim == 3 else samples[..., None], info


def to_pil(samples: np.ndarray, info: dict[str, Any]) -> Image.Image:
    if samples.dtype == np.uint16 and samples.shape[2] > 1:
        logger.warning("Pillow has no 16-bit mode for %d channels: the result is rounded to 8 bits", samples.shape[2])
        samples = ((samples.astype(np.uint32) * 255 + 32767) // 65535).astype(np.uint8)
    image = Image.fromarray(samples[..., 0] if samples.shape[2] == 1 else samples)
    image.info.update(info)
    return image


def read_file(path: str | Path, max_pixels: int) -> tuple[np.ndarray, dict[str, Any]]:
    """Returns the samples of a whole image, rotated upright, and its colour profile if it has one."""
    with open_image(path, max_pixels) as source:
        for note in source.notes:
            logger.warning("%s: %s", path, note)
        samples = source.rows(0, source.height)
        return samples, {"icc_profile": source.metadata.icc} if source.metadata.icc else {}


@dataclass(frozen=True, eq=False)
class ArrayTask(Task):
    """A task for an array: `samples` (H, W, 1…4) of uint8 or uint16; appends the upscaled image to `results`."""

    source: Path = _NAME
    target: Path = _NAME
    samples: np.ndarray = field(kw_only=True)
    results: list[np.ndarray] = field(default_factory=list, kw_only=True)

    @property
    def is_video(self) -> bool:
        return False


class ArraySource(AbstractContextManager["ArraySource"]):
    """Reads the rows of an array, with the interface of `ImageSource`."""

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

    def __exit__(self, *_: object) -> None:
        return None


class ArraySink:
    """Collects the rows of the result; `finish` appends the result to the task's `results`."""

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

"""Pillow images to arrays and back."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from redline.errors import RedlineError
from redline.upscale.images import open_image

logger = logging.getLogger(__name__)

_DIRECT = ("L", "LA", "RGB", "RGBA")
_CONVERTED = {"1": "L", "P": "RGB", "PA": "RGBA", "La": "LA", "RGBa": "RGBA", "RGBX": "RGB", "CMYK": "RGB"}
_CONVERTED |= {"YCbCr": "RGB", "HSV": "RGB", "LAB": "RGB"}
# Metadata of the source that is also valid for the upscaled image.
_KEPT_INFO = ("icc_profile", "exif", "dpi")


def from_pil(image: Image.Image) -> tuple[np.ndarray, dict[str, Any]]:
    """Returns the samples (H, W, channels) and the metadata to keep; raises `RedlineError` for other modes."""
    info = {name: image.info[name] for name in _KEPT_INFO if name in image.info}
    if image.mode.startswith("I;16"):
        return np.asarray(image).astype(np.uint16)[..., None], info
    mode = image.mode if image.mode in _DIRECT else _CONVERTED.get(image.mode)
    if mode is None:
        raise RedlineError(f"images of mode {image.mode!r} are not supported: convert it to L, LA, RGB, RGBA or I;16.")
    if image.mode != mode:
        if mode == "RGB" and "transparency" in image.info:
            mode = "RGBA"
        if image.mode == "CMYK":
            info.pop("icc_profile", None)  # it describes CMYK
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


def read_file(path: str | Path, pixel_limit: int) -> tuple[np.ndarray, dict[str, Any]]:
    """Reads a whole image, upright, and its colour profile."""
    with open_image(path, pixel_limit) as source:
        for note in source.notes:
            logger.warning("%s: %s", path, note)
        samples = source.rows(0, source.height)
        return samples, {"icc_profile": source.metadata.icc} if source.metadata.icc else {}

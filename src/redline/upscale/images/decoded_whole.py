"""Reads formats that libvips does not support: BMP, TGA and JPEG 2000, decoded as a whole when rows are needed.

Pillow decodes them. The reader of the detected format is called directly, so that Pillow tries no other format.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageFile
from PIL.BmpImagePlugin import BmpImageFile
from PIL.Jpeg2KImagePlugin import Jpeg2KImageFile
from PIL.TgaImagePlugin import TgaImageFile

from redline.upscale.images.formats import Format, ImageError
from redline.upscale.images.jpeg2000 import decode_deep, read_depth, read_profile
from redline.upscale.images.netpbm import load_netpbm, read_netpbm_header
from redline.upscale.images.samples import meaning_of, stretch
from redline.upscale.images.vips import DAMAGED, VipsImage, load_vips

_READERS: dict[str, type[ImageFile.ImageFile]] = {"bmp": BmpImageFile, "tga": TgaImageFile, "jp2": Jpeg2KImageFile}
_CHANNELS = {"1": 1, "L": 1, "LA": 2, "RGB": 3, "RGBA": 4}
_AS = {"1": "L", "P": "RGB", "RGBX": "RGB", "YCbCr": "RGB", "PA": "RGBA"}
_GREY_16 = ("I;16", "I;16B", "I;16L")
_MM_PER_INCH = 25.4
# These limits are below those of libvips, which prints to the terminal if its own are exceeded.
_LARGEST_SIDE_PX, _MOST_DPI = 10_000_000, 100_000


@dataclass(frozen=True)
class _Header:
    """`bits` is the depth of the file. Depths of 9 to 16 bits are decoded to the highest bits of 16."""

    width: int
    height: int
    channels: int
    bits: int
    mode: str
    dpi: tuple[float, float] | None
    profile: bytes | None


def load_header(path: Path, form: Format) -> VipsImage:
    """Returns a blank image with the size, type and metadata of the file; does not decode it."""
    pyvips = load_vips()
    if form.name == "pnm":
        header = read_netpbm_header(path)
        return _blank(path, header.width, header.height, header.channels, header.most > 255)
    header = _read_header(path, form)
    image = _blank(path, header.width, header.height, header.channels, header.bits > 8)
    if header.dpi and all(1 <= number <= _MOST_DPI for number in header.dpi):
        image = image.copy(xres=header.dpi[0] / _MM_PER_INCH, yres=header.dpi[1] / _MM_PER_INCH)
    if header.profile:
        image.set_type(pyvips.GValue.blob_type, "icc-profile-data", header.profile)
    return image


def load_whole(path: Path, form: Format) -> VipsImage:
    """Decodes the image; raises `ImageError` if it is damaged."""
    if form.name == "pnm":
        return load_netpbm(path, read_netpbm_header(path))
    header = _read_header(path, form)
    if header.bits > 8 and header.channels > 1:
        samples = decode_deep(path)
    else:
        with _opened(path, form) as image:
            try:
                samples = np.asarray(image if header.mode in _GREY_16 else image.convert(header.mode))
            except (OSError, SyntaxError, ValueError, IndexError, MemoryError) as error:
                raise ImageError(f"cannot read {str(path)!r}: {DAMAGED}.") from error
    samples = np.ascontiguousarray(samples if samples.ndim == 3 else samples[..., None])
    if samples.shape != (header.height, header.width, header.channels):
        raise ImageError(f"cannot read {str(path)!r}: {DAMAGED}.")
    deep = header.bits > 8
    kind = "ushort" if deep else "uchar"
    samples = samples.astype(np.uint16 if deep else np.uint8, copy=False)
    image = load_vips().Image.new_from_memory(samples, header.width, header.height, header.channels, kind)
    if deep:
        image = stretch(image, (2**header.bits - 1) << (16 - header.bits))
    return image.copy(interpretation=meaning_of(header.channels, deep))


def _read_header(path: Path, form: Format) -> _Header:
    bits, profile = 8, None
    if form.name == "jp2":
        components, bits = read_depth(path)
        profile = read_profile(path)
        if bits > 8 and components > 1:
            with _opened(path, form) as image:
                return _Header(*image.size, 4 if components == 4 else 3, bits, "", image.info.get("dpi"), profile)
    with _opened(path, form) as image:
        mode = _AS.get(image.mode, image.mode)
        if mode == "RGB" and "transparency" in image.info:
            mode = "RGBA"
        if mode in _GREY_16:
            return _Header(*image.size, 1, max(bits, 9), mode, image.info.get("dpi"), profile)
        if mode not in _CHANNELS:
            raise ImageError(f"cannot read {str(path)!r}: its mode {image.mode} is neither grey nor RGB.")
        return _Header(*image.size, _CHANNELS[mode], 8, mode.replace("1", "L"), image.info.get("dpi"), profile)


def _opened(path: Path, form: Format) -> Image.Image:
    try:
        return _READERS[form.name](path)
    except (OSError, SyntaxError, ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else DAMAGED
        raise ImageError(f"cannot read {str(path)!r}: {reason}.") from error


def _blank(path: Path, width: int, height: int, channels: int, deep: bool) -> VipsImage:
    if not 1 <= min(width, height) <= max(width, height) <= _LARGEST_SIDE_PX:
        raise ImageError(f"cannot read {str(path)!r}: {width:,} × {height:,} is not a valid image size.")
    image = load_vips().Image.black(width, height, bands=channels)
    image = image.cast("ushort") if deep else image
    return image.copy(interpretation=meaning_of(channels, deep))

"""Loads libvips on first use, makes its error messages readable, and converts images to grey or RGB of 8 or 16 bits.

libvips decodes and encodes strip by strip, so memory is constant for images of any size. Its operation cache is
disabled, because it would keep files open. Each pipeline has one worker thread, because callers process several images
at once. All conversions are lazy, and RGB keeps its colour space and its profile.
"""

import functools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from redline.upscale.images.formats import ImageError

# A `pyvips.Image`; the module is imported lazily.
VipsImage = Any

DAMAGED = "its data is damaged or truncated"
_NOISE = re.compile(r"bad seek to|wbuffer_write: write failed|Unknown error -1")
_SYSTEM_ERROR = re.compile(r"system error: (.+)")
_SPEAKER, _CODE = re.compile(r"^[\w ]+: "), re.compile(r" \([\d.]+\)$")
# Readable messages instead of uninformative ones of libvips.
_PLAINER = {
    "libpng read error": DAMAGED,
    "unable to parse image": DAMAGED,
    "unable to read pixels": DAMAGED,
    "bad labq format": "Lab colour is not supported",
}

_NO_DECODER = re.compile(r"compression format has not been built in|No decoding plugin installed|Unsupported codec")
_INSTALL_HEVC = (
    "the installed libvips has no decoder for HEVC, in which HEIC files are compressed; convert it to JPEG or PNG, or "
    "install a libvips with libheif and libde265 and remove the package pyvips-binary"
)
_GREY, _RGB = ("b-w", "grey16"), ("srgb", "rgb", "rgb16")
_BITS = {"uchar": 8, "ushort": 16}


@functools.cache
def load_vips() -> ModuleType:
    try:
        import pyvips
    except (ImportError, OSError) as error:
        raise ImageError("reading and writing images needs libvips: pip install 'pyvips[binary]'.") from error
    pyvips.cache_set_max(0)
    pyvips.vips_lib.vips_concurrency_set(1)
    return pyvips


def field(image: VipsImage, name: str, otherwise: Any = None) -> Any:
    """Returns a field of the image's header, or `otherwise` if it is missing."""
    return image.get(name) if image.get_typeof(name) else otherwise


@contextmanager
def explaining(doing: str, unexplained: str = DAMAGED) -> Iterator[None]:
    """Converts errors of libvips and the system to an `ImageError` such as `cannot read 'a.jpg': premature end …`."""
    pyvips = load_vips()
    # Successful operations leave warnings in the error buffer, which is shared by the process.
    pyvips.vips_lib.vips_error_clear()
    try:
        yield
    except pyvips.Error as error:
        raise ImageError(f"{doing}: {reason(error.detail, unexplained)}.") from error
    except OSError as error:
        raise ImageError(f"{doing}: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        # pyvips cannot decode a file name that is not UTF-8 in its error message.
        raise ImageError(f"{doing}: {unexplained}.") from error


def reason(detail: str, unexplained: str = DAMAGED) -> str:
    """Returns the cause that the messages of libvips state, or `unexplained` if they state none."""
    lines = [line.strip() for line in detail.splitlines() if line.strip() and not _NOISE.search(line)]
    for line in lines:
        if found := _SYSTEM_ERROR.search(line):
            return found[1]
    if any(_NO_DECODER.search(line) for line in lines):
        return _INSTALL_HEVC
    said = _CODE.sub("", _SPEAKER.sub("", lines[-1])).rstrip(".") if lines else unexplained
    return _PLAINER.get(said, said)


def normalise(image: VipsImage, path: Path) -> tuple[VipsImage, tuple[str, ...]]:
    """Returns the image as one to four channels of 8 or 16 bits, and notes on conversions."""
    if image.format not in _BITS:
        raise ImageError(
            f"cannot read {str(path)!r}: its samples are of type {image.format}; convert it to 8 or 16 bits first."
        )
    notes: tuple[str, ...] = ()
    if image.interpretation == "cmyk":
        has_profile = field(image, "icc-profile-data") is not None
        whose = "its profile" if has_profile else "a generic profile, because it has none"
        image, notes = to_srgb(image), (f"CMYK was converted to sRGB with {whose}",)
    counts = (1, 2) if image.interpretation in _GREY else (3, 4)
    if image.interpretation not in _GREY + _RGB or image.bands not in counts:
        raise ImageError(
            f"cannot read {str(path)!r}: {image.bands} channels of {image.interpretation} are neither grey nor RGB."
        )
    return _to_full_range(image), notes


def bits_of(image: VipsImage) -> int:
    return _BITS[image.format]


def meaning_of(channels: int, deep: bool) -> str:
    """Returns libvips' name for the interpretation of grey or RGB samples of 8 or, if `deep`, 16 bits."""
    return ("grey16" if deep else "b-w") if channels < 3 else ("rgb16" if deep else "srgb")


def stretch(image: VipsImage, white: int) -> VipsImage:
    """Scales the samples so that `white` becomes the largest value of their type."""
    largest = 2 ** bits_of(image) - 1
    return image if white == largest else (image * (largest / white)).rint().cast(image.format)


def has_grey_profile(profile: bytes | None) -> bool:
    """Returns whether the header of an ICC profile names grey as its colour space."""
    return profile is not None and profile[16:20] == b"GRAY"


def to_srgb(image: VipsImage) -> VipsImage:
    """Converts to sRGB with the profile of the image; CMYK without a profile uses a generic profile."""
    return image.icc_transform(
        "srgb",
        embedded=field(image, "icc-profile-data") is not None,
        input_profile="cmyk",
        intent="relative",
        black_point_compensation=True,
        depth=bits_of(image),
    )


def _to_full_range(image: VipsImage) -> VipsImage:
    """Scales 10- and 12-bit AVIF so that white, which is 65,472 or 65,520 in libvips, becomes 65,535."""
    if image.format != "ushort" or field(image, "heif-compression") is None:
        return image
    bits = image.get("bits-per-sample")
    white = (2**bits - 1) << (16 - bits)
    return stretch(image, white).copy(interpretation=image.interpretation)

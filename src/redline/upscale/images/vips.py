"""libvips, loaded when the first image needs it, and its errors put into sentences.

libvips decodes and encodes strip by strip, which keeps memory constant however large a image is. Its operation cache
is off, because it would keep files open that nobody asks for again, and each pipeline gets one worker thread, because
the callers work on several images at once.
"""

import functools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from redline.upscale.images.errors import ImageError

# A `pyvips.Image`, of a module that is not imported before it is needed.
VipsImage = Any

DAMAGED = "its data is damaged or cut short"
_NOISE = re.compile(r"bad seek to|wbuffer_write: write failed|Unknown error -1")
_SYSTEM_ERROR = re.compile(r"system error: (.+)")
_SPEAKER, _CODE = re.compile(r"^[\w ]+: "), re.compile(r" \([\d.]+\)$")
# What libvips says without saying anything.
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


@functools.cache
def load_vips() -> ModuleType:
    try:
        import pyvips
    except (ImportError, OSError) as error:
        raise ImageError("images are read and written by libvips: pip install 'pyvips[binary]'.") from error
    pyvips.cache_set_max(0)
    pyvips.vips_lib.vips_concurrency_set(1)
    return pyvips


def field(image: VipsImage, name: str, otherwise: Any = None) -> Any:
    """A field of an image's header, which few images have all of."""
    return image.get(name) if image.get_typeof(name) else otherwise


@contextmanager
def explaining(doing: str, unexplained: str = DAMAGED) -> Iterator[None]:
    """Turns what libvips or the system says into `cannot read 'photo.jpg': premature end of JPEG image.`"""
    pyvips = load_vips()
    # Operations that succeed leave remarks behind, and the buffer is one for the whole process.
    pyvips.vips_lib.vips_error_clear()
    try:
        yield
    except pyvips.Error as error:
        raise ImageError(f"{doing}: {reason(error.detail, unexplained)}.") from error
    except OSError as error:
        raise ImageError(f"{doing}: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        # A file name that is not UTF-8 breaks the binding's own text.
        raise ImageError(f"{doing}: {unexplained}.") from error


def reason(detail: str, unexplained: str = DAMAGED) -> str:
    """The one line of libvips' remarks that says the cause, if any does."""
    lines = [line.strip() for line in detail.splitlines() if line.strip() and not _NOISE.search(line)]
    for line in lines:
        if found := _SYSTEM_ERROR.search(line):
            return found[1]
    if any(_NO_DECODER.search(line) for line in lines):
        return _INSTALL_HEVC
    said = _CODE.sub("", _SPEAKER.sub("", lines[-1])).rstrip(".") if lines else unexplained
    return _PLAINER.get(said, said)

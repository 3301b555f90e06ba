"""Loads libvips when it is first needed, and turns its errors into readable messages.

libvips decodes and encodes strip by strip, so memory is constant for images of any size. Its operation cache is off,
because it would keep files open. Each pipeline has one worker thread, because callers process several images at once.
"""

import functools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from redline.upscale.images.formats import ImageError

# A `pyvips.Image`; the module is imported lazily.
VipsImage = Any

DAMAGED = "its data is damaged or cut short"
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
    """Returns the line of libvips' messages that names the cause, if there is one."""
    lines = [line.strip() for line in detail.splitlines() if line.strip() and not _NOISE.search(line)]
    for line in lines:
        if found := _SYSTEM_ERROR.search(line):
            return found[1]
    if any(_NO_DECODER.search(line) for line in lines):
        return _INSTALL_HEVC
    said = _CODE.sub("", _SPEAKER.sub("", lines[-1])).rstrip(".") if lines else unexplained
    return _PLAINER.get(said, said)

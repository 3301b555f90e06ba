"""Reads Netpbm files (PBM, PGM, PPM), which the packaged libvips does not support.

libvips reads binary grey and colour samples from the file strip by strip. Bitmaps and text are decoded as a whole.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from redline.upscale.images.formats import ImageError
from redline.upscale.images.samples import meaning_of, stretch
from redline.upscale.images.vips import DAMAGED, VipsImage, load_vips

_HEADER_BYTES = 4096
_BITMAPS, _TEXTS, _COLOUR = "14", "123", "36"
# White space or a comment. A header ends with exactly one white space character after its last number.
_GAP = rb"(?:\s|#[^\n]*\n)+"


@dataclass(frozen=True)
class NetpbmHeader:
    kind: str
    width: int
    height: int
    most: int
    data_offset: int

    @property
    def channels(self) -> int:
        return 3 if self.kind in _COLOUR else 1


def read_netpbm_header(path: Path) -> NetpbmHeader:
    """Reads the header; raises `ImageError` if it is damaged."""
    with path.open("rb") as file:
        head = file.read(_HEADER_BYTES)
    kind = head[1:2].decode("latin-1")
    numbers = 2 if kind in _BITMAPS else 3
    found = re.match(rb"P\d" + (_GAP + rb"(\d{1,9})") * numbers + rb"\s", head)
    if found is not None:
        width, height, *most = (int(number) for number in found.groups())
        header = NetpbmHeader(kind, width, height, most[0] if most else 1, found.end())
        if min(width, height) >= 1 and 1 <= header.most <= 65535:
            return header
    raise ImageError(f"cannot read {str(path)!r}: {DAMAGED}.")


def load_netpbm(path: Path, header: NetpbmHeader) -> VipsImage:
    """Loads the samples, scaled to the full range of 8 or 16 bits; raises `ImageError` if some are missing."""
    pyvips = load_vips()
    deep = header.most > 255
    kind, shape = "ushort" if deep else "uchar", (header.width, header.height, header.channels)
    if header.kind in _BITMAPS + _TEXTS:
        image = pyvips.Image.new_from_memory(_decoded(path, header), *shape, kind)
    else:
        image = pyvips.Image.rawload(os.fsencode(path), *shape, offset=header.data_offset, format=kind)
        if deep and np.little_endian:  # the file has the high byte first
            image = image.byteswap()
    return stretch(image, header.most).copy(interpretation=meaning_of(header.channels, deep))


def _decoded(path: Path, header: NetpbmHeader) -> np.ndarray:
    data = path.read_bytes()[header.data_offset :]
    count, dtype = header.width * header.height * header.channels, np.uint16 if header.most > 255 else np.uint8
    try:
        if header.kind == "4":
            rows = np.frombuffer(data, np.uint8, header.height * -(-header.width // 8)).reshape(header.height, -1)
            return 1 - np.unpackbits(rows, axis=1)[:, : header.width]
        text = re.sub(rb"#[^\n]*", b"", data)
        if header.kind == "1":  # digits need no space between them, and 1 is black
            return (1 - (np.frombuffer(re.sub(rb"[^01]", b"", text), np.uint8, count) - ord("0"))).astype(dtype)
        values = np.array(text.split(maxsplit=count)[:count], dtype=np.int64)
        if len(values) < count or values.max() > header.most:
            raise ValueError("samples are missing or too large")
        return values.astype(dtype)
    except ValueError as error:
        raise ImageError(f"cannot read {str(path)!r}: {DAMAGED}.") from error

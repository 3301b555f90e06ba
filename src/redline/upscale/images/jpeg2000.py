"""Reads the parts of JPEG 2000 that Pillow does not support: depth, colour profile, and colour of more than 8 bits.

FFmpeg decodes colour of more than 8 bits, which Pillow would round.
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import av
import numpy as np
from av.packet import Packet
from av.video.codeccontext import VideoCodecContext

from redline.upscale.images.errors import ImageError

SIGNATURES = (b"\x00\x00\x00\x0cjP  \r\n\x87\n", b"\xff\x4f\xff\x51")
_CODESTREAM_BYTES = 4096
_DEEP = ("rgb48le", "rgba64le")


def read_depth(path: Path) -> tuple[int, int]:
    """Returns the number of components and their largest depth, from the start of the codestream."""
    with path.open("rb") as file:
        if file.read(4) != SIGNATURES[1]:
            start = next((begin for kind, begin, _ in _boxes(file, 0, None) if kind == b"jp2c"), None)
            if start is None:
                raise ImageError(f"cannot read {str(path)!r}: it holds no JPEG 2000 data.")
            file.seek(start)
        else:
            file.seek(0)
        head = file.read(_CODESTREAM_BYTES)
    if head[:4] != SIGNATURES[1] or len(head) < 43:
        raise ImageError(f"cannot read {str(path)!r}: its data is damaged or cut short.")
    components = struct.unpack(">H", head[40:42])[0]
    depths = [(byte & 0x7F) + 1 for byte in head[42 : 42 + 3 * components : 3]]
    return components, max(depths, default=8)


def read_profile(path: Path) -> bytes | None:
    """Returns the ICC profile of a JP2 file, if it has one."""
    with path.open("rb") as file:
        for kind, begin, end in _boxes(file, 0, None):
            if kind != b"jp2h":
                continue
            for inner, start, stop in _boxes(file, begin, end):
                file.seek(start)
                if inner == b"colr" and file.read(3)[:1] in (b"\x02", b"\x03"):
                    return file.read(stop - start - 3)
    return None


def decode_deep(path: Path) -> np.ndarray:
    """Decodes colour of more than 8 bits to (H, W, 3 or 4) of uint16; samples use the highest bits."""
    decoder = av.CodecContext.create("jpeg2000", "r")
    assert isinstance(decoder, VideoCodecContext)
    try:
        frames = [*decoder.decode(Packet(path.read_bytes())), *decoder.decode(None)]
    except (av.FFmpegError, OSError) as error:
        raise ImageError(f"cannot read {str(path)!r}: its data is damaged or cut short.") from error
    if not frames or frames[0].is_corrupt:
        raise ImageError(f"cannot read {str(path)!r}: its data is damaged or cut short.")
    frame = frames[0]
    if frame.format.name not in _DEEP:
        raise ImageError(
            f"cannot read {str(path)!r}: its samples are {frame.format.name}; convert it to TIFF or PNG first."
        )
    return frame.to_ndarray()


def _boxes(file: BinaryIO, begin: int, end: int | None) -> Iterator[tuple[bytes, int, int]]:
    """Yields the type of each box and the start and end of its content; stops at invalid data."""
    file.seek(0, 2)
    end = file.tell() if end is None else min(end, file.tell())
    while begin + 8 <= end:
        file.seek(begin)
        length, kind = struct.unpack(">I4s", file.read(8))
        head = 8
        if length == 1:
            length, head = int.from_bytes(file.read(8), "big"), 16
        stop = end if length == 0 else begin + length
        if stop < begin + head or stop > end:
            return
        yield kind, begin + head, stop
        begin = stop

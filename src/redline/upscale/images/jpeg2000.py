"""Reads the parts of JPEG 2000 that Pillow does not support: depth, colour profile, and colour of more than 8 bits.

FFmpeg decodes colour of more than 8 bits, which Pillow would round.
"""

import struct
from pathlib import Path

import av
import numpy as np
from av.packet import Packet
from av.video.codeccontext import VideoCodecContext

from redline.upscale.images.formats import CODESTREAM_2000, ImageError, boxes
from redline.upscale.images.vips import DAMAGED

_CODESTREAM_BYTES = 4096
_DEEP = ("rgb48le", "rgba64le")


def read_depth(path: Path) -> tuple[int, int]:
    """Returns the number of components and their largest depth, from the start of the codestream."""
    with path.open("rb") as file:
        start = 0 if file.read(4) == CODESTREAM_2000 else None
        start = next((begin for kind, begin, _ in boxes(file) if kind == b"jp2c"), start)
        if start is None:
            raise ImageError(f"cannot read {str(path)!r}: it holds no JPEG 2000 data.")
        file.seek(start)
        head = file.read(_CODESTREAM_BYTES)
    if head[:4] != CODESTREAM_2000 or len(head) < 43:
        raise ImageError(f"cannot read {str(path)!r}: {DAMAGED}.")
    components = struct.unpack(">H", head[40:42])[0]
    depths = [(byte & 0x7F) + 1 for byte in head[42 : 42 + 3 * components : 3]]
    return components, max(depths, default=8)


def read_profile(path: Path) -> bytes | None:
    """Returns the ICC profile of a JP2 file, if it has one."""
    with path.open("rb") as file:
        for kind, begin, end in boxes(file):
            if kind != b"jp2h":
                continue
            for inner, start, stop in boxes(file, begin, end):
                file.seek(start)
                if inner == b"colr" and file.read(3)[:1] in (b"\x02", b"\x03"):
                    return file.read(stop - start - 3)
    return None


def decode_deep(path: Path) -> np.ndarray:
    """Decodes colour of more than 8 bits to (H, W, 3 or 4) of uint16; samples use the highest bits."""
    decoder = av.CodecContext.create("jpeg2000", "r")
    assert isinstance(decoder, VideoCodecContext)
    try:
        frame = [*decoder.decode(Packet(path.read_bytes())), *decoder.decode(None)][0]
    except (av.FFmpegError, OSError, IndexError) as error:
        raise ImageError(f"cannot read {str(path)!r}: {DAMAGED}.") from error
    if frame.is_corrupt:
        raise ImageError(f"cannot read {str(path)!r}: {DAMAGED}.")
    if frame.format.name not in _DEEP:
        raise ImageError(
            f"cannot read {str(path)!r}: its samples are {frame.format.name}; convert it to TIFF or PNG first."
        )
    return frame.to_ndarray()

"""Copies the comments of JPEG files, which libvips leaves out, and converts IPTC captions.

IPTC captions are in their plain form in TIFF, and in a Photoshop resource block in JPEG. The other resources of that
block, such as a thumbnail of the old image, are left out.
"""

import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from redline.upscale.images.formats import insert

_COMMENT, _SCAN = 0xFE, 0xDA
_APPLICATIONS = range(0xE0, 0xF0)
_PHOTOSHOP, _RESOURCE, _IPTC = b"Photoshop 3.0\0", b"8BIM", 0x0404


def read_comments(path: Path) -> tuple[bytes, ...]:
    with open(path, "rb") as file:
        return tuple(file.read(length) for marker, length in _segments(file) if marker == _COMMENT)


def add_comments(path: Path, comments: Iterable[bytes]) -> None:
    """Inserts the comments after the application segments, which must come first."""
    packed = b"".join(struct.pack(">BBH", 0xFF, _COMMENT, len(comment) + 2) + comment for comment in comments)
    with open(path, "r+b") as file:
        at = 2
        for marker, length in _segments(file):
            if marker not in _APPLICATIONS:
                break
            at = file.tell() + length
        insert(file, at, packed)


def _segments(file: BinaryIO) -> Iterator[tuple[int, int]]:
    """Yields marker and length of each segment before the pixels, with the file positioned at the segment's data."""
    at = 2
    while file.seek(at) == at and len(head := file.read(4)) == 4 and head[0] == 0xFF:
        if head[1] == 0xFF:  # fill bytes before a marker
            at += 1
            continue
        marker, length = head[1], struct.unpack(">H", head[2:])[0]
        if marker == _SCAN or length < 2:
            return
        yield marker, length - 2
        at += 2 + length


def unwrap(block: bytes) -> bytes | None:
    """Returns the plain form; None if a Photoshop block has no captions."""
    if not block.startswith(_PHOTOSHOP):
        return block
    at = len(_PHOTOSHOP)
    while block[at : at + 4] == _RESOURCE and len(block) >= at + 12:
        number = struct.unpack(">H", block[at + 4 : at + 6])[0]
        # The name has a length byte; name and data are padded to an even length.
        at += 6 + (block[at + 6] + 2) // 2 * 2
        if len(block) < at + 4:
            return None
        length = struct.unpack(">I", block[at : at + 4])[0]
        if number == _IPTC:
            return block[at + 4 : at + 4 + length] or None
        at += 4 + (length + 1) // 2 * 2
    return None


def wrap(captions: bytes) -> bytes:
    """Returns the Photoshop block for a JPEG file."""
    head = _PHOTOSHOP + _RESOURCE + struct.pack(">HHI", _IPTC, 0, len(captions))
    return head + captions + b"\0" * (len(captions) % 2)

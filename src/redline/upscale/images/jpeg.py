"""Copies the comments of JPEG files, which libvips leaves out."""

import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from redline.upscale.images.insertion import insert

_COMMENT, _SCAN = 0xFE, 0xDA
_APPLICATIONS = range(0xE0, 0xF0)


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

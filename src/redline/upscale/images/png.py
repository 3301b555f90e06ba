"""Reads and writes PNG chunks: texts, colour tags, resolution, and the number of frames.

libvips writes no colour tags except the ICC profile, and writes all texts as Latin-1. Therefore texts and colour tags
are copied from the source file to the file that libvips wrote.
"""

import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from redline.upscale.images.formats import insert

_SIGNATURE_BYTES, _HEADER_CHUNK_BYTES = 8, 25
_TEXTS = (b"tEXt", b"zTXt", b"iTXt")
_COLOURS = (b"gAMA", b"cHRM", b"sRGB", b"cICP", b"mDCV", b"cLLI")
_XMP = b"XML:com.adobe.xmp"
# Older programs stored EXIF, IPTC and profiles in texts with this name; copies would contradict the updated metadata.
_RAW_PROFILE = b"Raw profile type"


@dataclass(frozen=True)
class Chunk:
    kind: bytes
    data: bytes


def read_texts(path: Path) -> tuple[Chunk, ...]:
    """Returns the text chunks before and after the pixels, but not those with XMP or raw profiles."""
    return tuple(c for c in _read(path, _TEXTS, end=b"IEND") if not c.data.startswith((_XMP + b"\0", _RAW_PROFILE)))


def read_colours(path: Path) -> tuple[Chunk, ...]:
    """Returns all colour tags except the ICC profile. Searches only before the pixels, where PNG requires them."""
    return tuple(_read(path, _COLOURS, end=b"IDAT"))


def xmp_chunk(xmp: bytes) -> Chunk:
    """Returns an XMP chunk that is neither compressed nor marked as translated, because programs expect this form."""
    return Chunk(b"iTXt", _XMP + b"\0\0\0\0\0" + xmp)


def add_to_png(path: Path, chunks: Iterable[Chunk]) -> None:
    """Inserts chunks directly after the header chunk, because colour tags must precede the pixels."""
    packed = b"".join(
        struct.pack(">I", len(chunk.data)) + chunk.kind + chunk.data + _sum(chunk.kind + chunk.data) for chunk in chunks
    )
    with open(path, "r+b") as file:
        insert(file, _SIGNATURE_BYTES + _HEADER_CHUNK_BYTES, packed)


def count_png_frames(path: Path) -> int:
    """Returns the number of frames of a PNG, which libvips does not report; 1 if it is not animated."""
    found = _first(path, b"acTL")
    return struct.unpack(">I", found[:4])[0] if len(found) == 8 else 1


def has_png_resolution(path: Path) -> bool:
    """Returns whether the file has a resolution, and not only a pixel aspect ratio."""
    found = _first(path, b"pHYs")
    return len(found) == 9 and found[8:] == b"\x01"


def forget_png_resolution(path: Path) -> None:
    """Replaces the resolution, which libvips writes into every PNG, by the statement that pixels are square."""
    square = struct.pack(">IIB", 1, 1, 0)
    with open(path, "r+b") as file:
        for kind, length in _chunks(file):
            if kind == b"pHYs" and length == len(square):
                file.write(square + _sum(kind + square))
                return


def _first(path: Path, wanted: bytes) -> bytes:
    """Returns the data of the first chunk of this kind before the pixels, or empty bytes."""
    return next((chunk.data for chunk in _read(path, (wanted,), end=b"IDAT")), b"")


def _read(path: Path, wanted: tuple[bytes, ...], end: bytes) -> Iterator[Chunk]:
    # Unbuffered, because a large image has many chunks of which only the headers are read.
    with open(path, "rb", buffering=0) as file:
        for kind, length in _chunks(file):
            if kind == end:
                return
            if kind in wanted:
                yield Chunk(kind, file.read(length))


def _chunks(file: BinaryIO) -> Iterator[tuple[bytes, int]]:
    """Yields type and length of every complete chunk, with the file positioned at its data."""
    at, end = _SIGNATURE_BYTES, file.seek(0, 2)
    while at + 12 <= end:
        file.seek(at)
        length, kind = struct.unpack(">I4s", file.read(8))
        at += 12 + length
        if at > end:
            return
        yield kind, length


def _sum(data: bytes) -> bytes:
    return struct.pack(">I", zlib.crc32(data))

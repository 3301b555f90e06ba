"""The chunks of PNG files: texts and colours as they are, resolution, and how many frames there are.

libvips leaves the colours out but for the profile, and writes every text as if it were Latin-1. So this takes both from
a file and adds them to one that libvips has written.
"""

import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from redline.upscale.images.insertion import insert

_SIGNATURE_BYTES, _HEADER_CHUNK_BYTES = 8, 25
_TEXTS = (b"tEXt", b"zTXt", b"iTXt")
_COLOURS = (b"gAMA", b"cHRM", b"sRGB", b"cICP", b"mDCV", b"cLLI")
_XMP = b"XML:com.adobe.xmp"
# EXIF, IPTC and profiles as older programs stored them: they would contradict the real ones.
_RAW_PROFILE = b"Raw profile type"


@dataclass(frozen=True)
class Chunk:
    kind: bytes
    data: bytes


def read_texts(path: Path) -> tuple[Chunk, ...]:
    """All texts of a file but XMP, before its pixels and behind them."""
    return tuple(c for c in _read(path, _TEXTS, end=b"IEND") if not c.data.startswith((_XMP + b"\0", _RAW_PROFILE)))


def read_colours(path: Path) -> tuple[Chunk, ...]:
    """What a file says of its colours, beside a profile; it has to say so before its pixels."""
    return tuple(_read(path, _COLOURS, end=b"IDAT"))


def xmp_chunk(xmp: bytes) -> Chunk:
    """Neither compressed nor translated: the form in which programs look for it."""
    return Chunk(b"iTXt", _XMP + b"\0\0\0\0\0" + xmp)


def add_to_png(path: Path, chunks: Iterable[Chunk]) -> None:
    """Puts chunks before all others but the header, where colours have to stand."""
    packed = b"".join(
        struct.pack(">I", len(chunk.data)) + chunk.kind + chunk.data + _sum(chunk.kind + chunk.data) for chunk in chunks
    )
    with open(path, "r+b") as file:
        insert(file, _SIGNATURE_BYTES + _HEADER_CHUNK_BYTES, packed)


def count_png_frames(path: Path) -> int:
    """How many frames an animated PNG has; libvips sees the first alone."""
    found = _first(path, b"acTL")
    return struct.unpack(">I", found[:4])[0] if len(found) == 8 else 1


def has_png_resolution(path: Path) -> bool:
    """Whether it says how large its pixels are, and not just of what shape."""
    found = _first(path, b"pHYs")
    return len(found) == 9 and found[8:] == b"\x01"


def forget_png_resolution(path: Path) -> None:
    """libvips gives every PNG a resolution; of one that has none, only that its pixels are square may be told."""
    square = struct.pack(">IIB", 1, 1, 0)
    with open(path, "r+b") as file:
        for kind, length in _chunks(file):
            if kind == b"pHYs" and length == len(square):
                file.write(square + _sum(kind + square))
                return


def _first(path: Path, wanted: bytes) -> bytes:
    """What the first such chunk before the pixels holds; nothing where there is none."""
    return next((chunk.data for chunk in _read(path, (wanted,), end=b"IDAT")), b"")


def _read(path: Path, wanted: tuple[bytes, ...], end: bytes) -> Iterator[Chunk]:
    # Unbuffered: a large image has many chunks, of which nothing but the heads is wanted.
    with open(path, "rb", buffering=0) as file:
        for kind, length in _chunks(file):
            if kind == end:
                return
            if kind in wanted:
                yield Chunk(kind, file.read(length))


def _chunks(file: BinaryIO) -> Iterator[tuple[bytes, int]]:
    """Kind and length of every chunk that is whole; the file then stands where its data begins."""
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

"""The image formats: recognises a file by its content, and defines what each format can hold."""

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from redline.errors import RedlineError

HEAD_BYTES = 256

# The possible sizes in bytes of the header of a BMP file of Windows or OS/2.
_BMP_SIZES = b"|".join(re.escape(struct.pack("<I", size)) for size in (12, 16, 40, 52, 56, 64, 108, 124))
CODESTREAM_2000 = b"\xff\x4f\xff\x51"
_SIGNATURES = {
    name: re.compile(start, re.DOTALL)
    for name, start in {
        "png": rb"\x89PNG\r\n\x1a\n",
        "jpeg": rb"\xff\xd8\xff",
        "webp": rb"RIFF.{4}WEBP",
        "tiff": rb"II[*+]\0|MM\0[*+]",
        "gif": rb"GIF8[79]a",
        "pnm": rb"P[1-6][\s#]",
        "bmp": rb"BM.{12}(?:" + _BMP_SIZES + rb")",
        "jp2": rb"\0\0\0\x0cjP  \r\n\x87\n|" + re.escape(CODESTREAM_2000),
    }.items()
}
_BRANDS = {"avif": {b"avif", b"avis"}, "heic": {b"heic", b"heix", b"heim", b"heis", b"hevc", b"mif1"}}
# The size of the pieces in which `insert` moves data.
_PIECE_BYTES = 4 * 2**20
# Suffixes of camera raw files: they are TIFF files in which a TIFF reader finds only a thumbnail.
_CAMERA_RAW = {".3fr", ".arw", ".cr2", ".dng", ".erf", ".nef", ".nrw", ".orf", ".pef", ".rw2", ".sr2", ".srw"}


class ImageError(RedlineError):
    """Raised for an image that cannot be read or written, or that a format cannot hold."""


class UnsupportedImage(ImageError):
    """Raised for an image in a known but unsupported format."""


@dataclass(frozen=True)
class Format:
    """A format: its limits on side length and bits per sample, and whether it supports alpha, grey and writing."""

    name: str
    title: str
    suffixes: tuple[str, ...]
    loader: str
    largest_side_px: int | None = None
    bits: int = 8
    alpha: bool = True
    grey: bool = True
    writable: bool = True


# The value of `loader` for formats that `decoded_whole` reads.
WHOLE = ""

FORMATS = {
    form.name: form
    for form in (
        Format("png", "PNG", (".png", ".apng"), "pngload", bits=16),
        Format("jpeg", "JPEG", (".jpg", ".jpeg", ".jpe", ".jfif"), "jpegload", 65_500, alpha=False),
        Format("webp", "WebP", (".webp",), "webpload", 16_383, grey=False),
        Format("tiff", "TIFF", (".tif", ".tiff"), "tiffload", bits=16),
        Format("avif", "AVIF", (".avif", ".avifs"), "heifload", 16_384, bits=12, grey=False),
        Format("gif", "GIF", (".gif",), "gifload", writable=False),
        Format("bmp", "BMP", (".bmp", ".dib"), WHOLE, writable=False),
        Format("pnm", "PPM", (".ppm", ".pgm", ".pbm", ".pnm"), WHOLE, bits=16, writable=False),
        Format("tga", "TGA", (".tga", ".icb", ".vda", ".vst"), WHOLE, writable=False),
        Format("jp2", "JPEG 2000", (".jp2", ".j2k", ".j2c", ".jpc", ".jpf", ".jpx"), WHOLE, bits=16, writable=False),
        Format("heic", "HEIC", (".heic", ".heif", ".hif"), "heifload", bits=12, writable=False),
    )
}


def sniff(path: Path, head: bytes) -> Format:
    """Returns the format by the first bytes of the file; raises `ImageError` if it is unknown."""
    if not head:
        raise ImageError(f"cannot read {str(path)!r}: it is empty.")
    if path.suffix.lower() in _CAMERA_RAW:
        raise UnsupportedImage(
            f"cannot read {str(path)!r}: it is a camera's raw file; develop it to TIFF or PNG first."
        )
    name = _sniff_name(head)
    if not name and path.suffix.lower() in FORMATS["tga"].suffixes and _looks_like_tga(head):
        name = "tga"
    if name not in FORMATS:
        known = ", ".join(form.title for form in FORMATS.values())
        raise ImageError(f"cannot read {str(path)!r}: unknown image format; supported are {known}.")
    return FORMATS[name]


def _sniff_name(head: bytes) -> str:
    for name, signature in _SIGNATURES.items():
        if signature.match(head):
            return name
    brands = brands_of(head)
    return next((name for name, wanted in _BRANDS.items() if brands & wanted), "")


def _looks_like_tga(head: bytes) -> bool:
    """Checks the pixel type and the size, because TGA has no signature."""
    if len(head) < 18:
        return False
    has_palette, kind, width, height, depth = head[1], head[2], head[12:14], head[14:16], head[16]
    known = has_palette in (0, 1) and kind in (1, 2, 3, 9, 10, 11) and depth in (8, 15, 16, 24, 32)
    return known and width != b"\0\0" and height != b"\0\0"


def brands_of(head: bytes) -> set[bytes]:
    """Returns the major and the compatible brands of an ISO media file; skips the minor version between them."""
    if len(head) < 16 or head[4:8] != b"ftyp":
        return set()
    box = head[8 : min(struct.unpack(">I", head[:4])[0], len(head))]
    return {box[at : at + 4] for at in range(0, len(box) - 3, 4) if at != 4}


def boxes(file: BinaryIO, begin: int = 0, end: int | None = None) -> Iterator[tuple[bytes, int, int]]:
    """Yields the type of each ISO media box, and the start and end of its content; stops at invalid data."""
    end = min(file.seek(0, 2) if end is None else end, file.seek(0, 2))
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


def insert(file: BinaryIO, at: int, data: bytes) -> None:
    """Inserts `data` at `at`; first moves the bytes from there on, piece by piece, the last piece first."""
    end = file.seek(0, 2)
    for start in reversed(range(at, end, _PIECE_BYTES)):
        file.seek(start)
        piece = file.read(min(_PIECE_BYTES, end - start))
        file.seek(start + len(data))
        file.write(piece)
    file.seek(at)
    file.write(data)


def format_for(path: Path) -> Format:
    """Returns the output format for the suffix of a file name."""
    suffix = path.suffix.lower()
    writable = [form for form in FORMATS.values() if form.writable]
    for form in writable:
        if suffix in form.suffixes:
            return form
    choice = ", ".join(form.suffixes[0] for form in writable)
    problem = f"unknown image format {suffix!r}" if suffix else "its name has no image format"
    raise ImageError(f"cannot write {str(path)!r}: {problem}; use one of {choice}.")


def check_can_hold(
    form: Format, width: int, height: int, channels: int, bits: int, depth: int | None = None
) -> tuple[str, ...]:
    """Raises `ImageError` if the format cannot hold such an image; returns notes on what will be rounded.

    `depth` is the original depth of samples that are stored in 16 bits.
    """
    if not form.writable:
        raise ImageError(f"{form.title} files can be read but not written: choose png or webp.")
    if channels not in (1, 2, 3, 4) or bits not in (8, 16) or min(width, height) < 1:
        raise ImageError(f"cannot write {width} × {height} pixels of {channels} channels and {bits} bits.")
    largest = form.largest_side_px
    if largest is not None and max(width, height) > largest:
        raise ImageError(
            f"{form.title} is limited to {largest:,} pixels per side and the image has {width:,} × {height:,}: "
            "choose png or tiff."
        )
    if channels in (2, 4) and not form.alpha:
        raise ImageError(f"{form.title} cannot hold transparency: choose png.")
    if (depth or bits) > form.bits:
        return (f"{form.title} holds {form.bits} bits: the {depth or bits}-bit image was rounded",)
    return ()

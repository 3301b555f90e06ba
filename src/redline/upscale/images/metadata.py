"""Copies metadata from one image file to another.

When libvips encodes, it updates orientation, resolution and size in EXIF and drops the old thumbnail. It does not do so
for TIFF, which `exif.py` handles. `png.py` and `colour_tags.py` add other metadata that libvips does not write; this
module adds the comments of JPEG files.
"""

import re
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from redline.upscale.images.colour_tags import fit_colour_tags, numbers_of, read_colour_tags, set_cicp
from redline.upscale.images.exif import add_to_tiff, read_from_tiff, resolution, upright
from redline.upscale.images.formats import Format, insert
from redline.upscale.images.png import (
    Chunk,
    add_to_png,
    forget_png_resolution,
    has_png_resolution,
    read_texts,
    xmp_chunk,
)
from redline.upscale.images.vips import VipsImage, field, has_grey_profile, load_vips, to_srgb

_MM_PER_INCH = 25.4
# The resolution that libvips and most programs assume for images without one.
_USUAL_DPI = 72.0
_SAYS_NOTHING_DPI = (_USUAL_DPI, _MM_PER_INCH)
_DPI_IN_EXIF = ("webp", "avif", "heic")
_BLOBS = {"icc": "icc-profile-data", "exif": "exif-data", "xmp": "xmp-data", "iptc": "iptc-data"}
# Metadata that Redline writes itself, because libvips would store it elsewhere or in another form.
_NOT_BY_VIPS = {"tiff": ("exif", "iptc"), "png": ("xmp",)}
# The largest metadata block in a JPEG segment, without the identifier of XMP or EXIF.
_JPEG_SEGMENT_BYTES = 65_500
_HELD_BY = {
    "iptc": (("jpeg", "tiff"), "IPTC, which was"),
    "text": (("png",), "PNG texts, which were"),
    "comments": (("jpeg",), "JPEG comments, which were"),
}
_COMMENT, _SCAN = 0xFE, 0xDA
_APPLICATIONS = range(0xE0, 0xF0)
_PHOTOSHOP, _RESOURCE, _IPTC = b"Photoshop 3.0\0", b"8BIM", 0x0404


@dataclass(frozen=True)
class Metadata:
    """The metadata of an image file.

    `text` holds the texts of a PNG, `comments` the comments of a JPEG, and `colour` the colour tags other than the ICC
    profile. `depth` is the original depth of samples that are stored in 16 bits. `exif` has orientation 1 (upright).
    """

    icc: bytes | None = None
    exif: bytes | None = None
    xmp: bytes | None = None
    iptc: bytes | None = None
    dpi: tuple[float, float] | None = None
    text: tuple[Chunk, ...] = ()
    comments: tuple[bytes, ...] = ()
    colour: tuple[Chunk, ...] = ()
    depth: int | None = None

    def stripped(self) -> "Metadata":
        """Returns only the metadata that defines the colours."""
        return Metadata(icc=self.icc, colour=self.colour, depth=self.depth)


def read_metadata(image: VipsImage, path: Path, form: Format) -> Metadata:
    """Reads the metadata; `image` must not be rotated upright yet."""
    blobs: dict[str, Any] = {
        name: bytes(block) for name, key in _BLOBS.items() if (block := field(image, key)) is not None
    }
    if form.name == "tiff":
        blobs |= read_from_tiff(path)
    elif "iptc" in blobs:
        blobs["iptc"] = unwrap(blobs["iptc"])
    if "exif" in blobs:
        blobs["exif"] = upright(blobs["exif"])
    if "xmp" in blobs:
        blobs["xmp"] = _with_values(blobs["xmp"], {b"tiff:Orientation": 1})
    return Metadata(
        **blobs,
        dpi=_dpi_of(image, path, form, blobs.get("exif")),
        text=read_texts(path) if form.name == "png" else (),
        comments=read_comments(path) if form.name == "jpeg" else (),
        colour=read_colour_tags(path, form, "icc" in blobs),
        depth=image.get("bits-per-sample") if form.name in ("avif", "heic") and image.format == "ushort" else None,
    )


def _dpi_of(image: VipsImage, path: Path, form: Format, exif: bytes | None) -> tuple[float, float] | None:
    said = (image.xres * _MM_PER_INCH, image.yres * _MM_PER_INCH)
    if form.name in _DPI_IN_EXIF and exif is not None:
        said = resolution(exif) or said
    across, down = (round(number, 2) for number in said)
    if form.name == "png":
        says_nothing = not has_png_resolution(path)
    else:
        says_nothing = across == down and min(abs(across - number) for number in _SAYS_NOTHING_DPI) < 0.05
    if says_nothing or min(across, down) <= 0:
        return None
    return (down, across) if field(image, "orientation", 1) > 4 else (across, down)


def fit_metadata(metadata: Metadata, form: Format, width: int, height: int) -> tuple[Metadata, tuple[str, ...]]:
    """Returns the metadata that the format can hold, updated to this size, and notes on omitted metadata."""
    notes = []
    if metadata.xmp is not None:
        sizes = {b"tiff:ImageWidth": width, b"tiff:ImageLength": height}
        sizes |= {b"exif:PixelXDimension": width, b"exif:PixelYDimension": height}
        metadata = replace(metadata, xmp=_with_values(metadata.xmp, sizes))
    for name, (holders, lost) in _HELD_BY.items():
        if getattr(metadata, name) and form.name not in holders:
            notes.append(f"{form.title} cannot hold {lost} left out")
            metadata = replace(metadata, **{name: getattr(Metadata, name)})
    colour, note = fit_colour_tags(metadata.colour, form, metadata.icc is not None)
    notes += [note] if note else []
    metadata = replace(metadata, colour=colour)
    if not form.grey and has_grey_profile(metadata.icc):
        notes.append(f"{form.title} does not support grey: the image was converted to sRGB with its profile")
    if metadata.iptc is not None and form.name == "jpeg":
        metadata = replace(metadata, iptc=wrap(metadata.iptc))
    for name in ("exif", "xmp", "iptc"):
        block = getattr(metadata, name)
        if form.name == "jpeg" and block is not None and len(block) > _JPEG_SEGMENT_BYTES:
            notes.append(f"{name.upper()} of {len(block):,} bytes is too long for JPEG and was left out")
            metadata = replace(metadata, **{name: getattr(Metadata, name)})
    return metadata, tuple(notes)


def attach_metadata(image: VipsImage, metadata: Metadata, form: Format) -> tuple[VipsImage, int]:
    """Returns a copy of the image with the metadata, and the flags for what the encoder keeps."""
    pyvips = load_vips()
    across, down = metadata.dpi or (_USUAL_DPI, _USUAL_DPI)
    image = image.copy(xres=across / _MM_PER_INCH, yres=down / _MM_PER_INCH)
    for name, key in _BLOBS.items():
        block = getattr(metadata, name)
        if block is not None and name not in _NOT_BY_VIPS.get(form.name, ()):
            image.set_type(pyvips.GValue.blob_type, key, block)
    if not form.grey and has_grey_profile(metadata.icc):
        image = to_srgb(image)
    image.set_type(pyvips.GValue.gint_type, "orientation", 1)
    flags = pyvips.ForeignKeep
    keep = flags.ICC | flags.XMP | flags.IPTC | flags.OTHER
    # With this flag, libvips creates EXIF even if there was none, so it is set only for EXIF, and for a resolution,
    # which all formats except PNG and TIFF store in EXIF.
    if metadata.exif is not None or (metadata.dpi is not None and form.name not in ("png", "tiff")):
        keep |= flags.EXIF
    return image, keep


def add_metadata(path: Path, metadata: Metadata, form: Format, width: int, height: int) -> None:
    """Completes a file that libvips wrote: adds the metadata that libvips left out."""
    if form.name == "tiff" and (metadata.exif or metadata.iptc):
        add_to_tiff(path, metadata.exif, metadata.iptc, width, height)
    elif form.name == "png":
        if metadata.dpi is None:
            forget_png_resolution(path)
        xmp = () if metadata.xmp is None else (xmp_chunk(metadata.xmp),)
        if chunks := (*metadata.colour, *xmp, *metadata.text):
            add_to_png(path, chunks)
    elif form.name == "jpeg" and metadata.comments:
        add_comments(path, metadata.comments)
    elif form.name == "avif":
        for numbers in filter(None, map(numbers_of, metadata.colour)):
            set_cicp(path, *numbers)


def _with_values(xmp: bytes, values: dict[bytes, int]) -> bytes:
    """Replaces the numbers of these properties in XMP, whether they are attributes or elements."""
    for name, value in values.items():
        number = str(value).encode()
        xmp = re.sub(rb"(\b" + name + rb"\s*=\s*[\"'])\d+", rb"\g<1>" + number, xmp)
        xmp = re.sub(rb"(<" + name + rb"\s*>\s*)\d+", rb"\g<1>" + number, xmp)
    return xmp


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
    """Returns IPTC captions in the plain form that TIFF uses.

    JPEG wraps them in a Photoshop block. Returns None if that block has no captions, and leaves out its other
    resources, such as a thumbnail of the old image.
    """
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
    """Wraps IPTC captions in a Photoshop block, as JPEG files need."""
    head = _PHOTOSHOP + _RESOURCE + struct.pack(">HHI", _IPTC, 0, len(captions))
    return head + captions + b"\0" * (len(captions) % 2)

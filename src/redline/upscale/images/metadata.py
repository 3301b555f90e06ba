"""What a image file carries beside its pixels, taken from one file and put into another.

libvips rewrites EXIF as it encodes: orientation, resolution and size become those of the new image, and an embedded
thumbnail of the old one is left out. It does so in every format but TIFF, which `tiff.py` serves. What else it does not
write is added to its file: `png.py`, `jpeg.py` and `avif.py` know how.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from redline.upscale.images.avif import set_cicp
from redline.upscale.images.colour_tags import fit_colour_tags, numbers_of, read_colour_tags
from redline.upscale.images.exif import resolution, upright
from redline.upscale.images.formats import Format
from redline.upscale.images.iptc import unwrap, wrap
from redline.upscale.images.jpeg import add_comments, read_comments
from redline.upscale.images.png import (
    Chunk,
    add_to_png,
    forget_png_resolution,
    has_png_resolution,
    read_texts,
    xmp_chunk,
)
from redline.upscale.images.samples import has_grey_profile, to_srgb
from redline.upscale.images.tiff import add_to_tiff, read_from_tiff
from redline.upscale.images.vips import VipsImage, field, load_vips

_MM_PER_INCH = 25.4
# What libvips and most programs take a image for that says nothing.
_USUAL_DPI = 72.0
_SAYS_NOTHING_DPI = (_USUAL_DPI, _MM_PER_INCH)
_DPI_IN_EXIF = ("webp", "avif", "heic")
_BLOBS = {"icc": "icc-profile-data", "exif": "exif-data", "xmp": "xmp-data", "iptc": "iptc-data"}
# What is written by us, because libvips writes it elsewhere or in another form.
_BY_US = {"tiff": ("exif", "iptc"), "png": ("xmp",)}
# One segment of a JPEG file, less what marks it as XMP or EXIF.
_JPEG_SEGMENT_BYTES = 65_500
_HOLDS_IPTC = ("jpeg", "tiff")


@dataclass(frozen=True)
class Metadata:
    """Colour profile, camera's tags (upright), XMP, IPTC, dots per inch, the texts of a PNG file and the comments of a
    JPEG file, what else is said of colours, and of how many bits samples are that come as 16."""

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
        """Nothing but the colour profile and its like, without which the colours would be other ones."""
        return Metadata(icc=self.icc, colour=self.colour, depth=self.depth)


def read_metadata(image: VipsImage, path: Path, form: Format) -> Metadata:
    """Everything from the header of a image that is not yet turned upright."""
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
    """The metadata as the format can hold it for a image of this size, and notes on what is left out."""
    notes = []
    if metadata.xmp is not None:
        sizes = {b"tiff:ImageWidth": width, b"tiff:ImageLength": height}
        sizes |= {b"exif:PixelXDimension": width, b"exif:PixelYDimension": height}
        metadata = replace(metadata, xmp=_with_values(metadata.xmp, sizes))
    if metadata.iptc is not None and form.name not in _HOLDS_IPTC:
        notes.append(f"{form.title} has no room for IPTC, which was left out")
        metadata = replace(metadata, iptc=None)
    if metadata.text and form.name != "png":
        notes.append(f"{form.title} has no room for the texts of a PNG, which were left out")
        metadata = replace(metadata, text=())
    if metadata.comments and form.name != "jpeg":
        notes.append(f"{form.title} has no room for the comments of a JPEG, which were left out")
        metadata = replace(metadata, comments=())
    colour, note = fit_colour_tags(metadata.colour, form, metadata.icc is not None)
    notes += [note] if note else []
    metadata = replace(metadata, colour=colour)
    if not form.grey and has_grey_profile(metadata.icc):
        notes.append(f"{form.title} has no grey: the image was converted to sRGB with its own profile")
    if metadata.iptc is not None and form.name == "jpeg":
        metadata = replace(metadata, iptc=wrap(metadata.iptc))
    for name in ("exif", "xmp", "iptc"):
        block = getattr(metadata, name)
        if form.name == "jpeg" and block is not None and len(block) > _JPEG_SEGMENT_BYTES:
            notes.append(f"{name.upper()} of {len(block):,} bytes is too long for JPEG and was left out")
            metadata = replace(metadata, **{name: None})
    return metadata, tuple(notes)


def attach_metadata(image: VipsImage, metadata: Metadata, form: Format) -> tuple[VipsImage, int]:
    """A copy of the image that carries the metadata, and what the encoder is to keep of it."""
    pyvips = load_vips()
    across, down = metadata.dpi or (_USUAL_DPI, _USUAL_DPI)
    image = image.copy(xres=across / _MM_PER_INCH, yres=down / _MM_PER_INCH)
    for name, key in _BLOBS.items():
        block = getattr(metadata, name)
        if block is not None and name not in _BY_US.get(form.name, ()):
            image.set_type(pyvips.GValue.blob_type, key, block)
    if not form.grey and has_grey_profile(metadata.icc):
        image = to_srgb(image)
    image.set_type(pyvips.GValue.gint_type, "orientation", 1)
    flags = pyvips.ForeignKeep
    keep = flags.ICC | flags.XMP | flags.IPTC | flags.OTHER
    # Without this flag no EXIF is made up for a image that had none; these formats keep the resolution nowhere else.
    if metadata.exif is not None or (metadata.dpi is not None and form.name not in ("png", "tiff")):
        keep |= flags.EXIF
    return image, keep


def add_metadata(path: Path, metadata: Metadata, form: Format, width: int, height: int) -> None:
    """Adds what libvips does not write to a file that it has written."""
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
    """XMP with other numbers for these properties, where it has them, as attributes or as elements."""
    for name, value in values.items():
        number = str(value).encode()
        xmp = re.sub(rb"(\b" + name + rb"\s*=\s*[\"'])\d+", rb"\g<1>" + number, xmp)
        xmp = re.sub(rb"(<" + name + rb"\s*>\s*)\d+", rb"\g<1>" + number, xmp)
    return xmp

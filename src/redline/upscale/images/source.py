"""Reads an image file as rows of samples, upright, from the top down, in constant memory.

Damaged files are refused instead of being filled with grey: warnings of decoders count as errors, because some decoders
only warn about lost data. A JPEG with a harmless flaw in its header, which some cameras write, is read again without
this check, and a note reports the flaw.

A rotated image cannot be read from the top down: libvips first decodes all of it, into memory if it needs at most
100 MB, else into a temporary file.
"""

import os
import re
import stat
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import numpy as np

from redline.choices import PIXEL_LIMIT
from redline.upscale.images.decoded_whole import load_header, load_whole
from redline.upscale.images.exif import has_raw_ycbcr
from redline.upscale.images.formats import HEAD_BYTES, WHOLE, Format, ImageError, brands_of, sniff
from redline.upscale.images.metadata import Metadata, read_metadata
from redline.upscale.images.png import count_png_frames
from redline.upscale.images.vips import VipsImage, bits_of, explaining, field, load_vips, normalise

# Rows per call of libvips, as a compromise between few calls and little memory.
_ROWS_AT_ONCE = 64
_HARMLESS = re.compile(
    r"unknown JFIF revision|Invalid SOS parameters|Unknown Adobe color transform"
    r"|extraneous bytes before marker 0x(?!d[0-7])"
)


def open_image(path: Path | str, max_pixels: int = PIXEL_LIMIT, random_access: bool = False) -> "ImageSource":
    """Opens an image file and reads its header; raises `ImageError` if it cannot be read."""
    path = Path(path)
    head = _read_head(path)
    form = sniff(path, head)
    with explaining(_reading(path)):
        header = _load(path, form, sequential=not random_access, strict=True)
        if header.width * header.height > max_pixels:
            raise ImageError(
                f"{str(path)!r} has {header.width * header.height:,} pixels ({header.width:,} × {header.height:,}), "
                f"more than the limit of {max_pixels:,}: raise it with --max-pixels."
            )
        if form.name == "tiff" and has_raw_ycbcr(path):
            raise ImageError(
                f"cannot read {str(path)!r}: its colours are YCbCr without JPEG compression, which libvips reads as "
                "RGB; save it as RGB first."
            )
        metadata = read_metadata(header, path, form)
        notes = _notes_on(header, path, form, head, metadata)
        return ImageSource(path, form, metadata, notes, random_access)


def sniffed(path: Path) -> Format:
    """Returns the format of an image by its content; raises `ImageError` if it is unknown."""
    return sniff(path, _read_head(path))


class ImageSource(AbstractContextManager["ImageSource"]):
    """An open image, made by `open_image`. Any thread may use it, one at a time."""

    def __init__(
        self, path: Path, form: Format, metadata: Metadata, notes: tuple[str, ...], random_access: bool
    ) -> None:
        self.path, self.format = path, form.name
        self._form, self._random_access, self._strict = form, random_access, True
        # An image of a format without streaming is blank until its first rows are read.
        self._is_blank = form.loader == WHOLE
        self._image, converted = decode(path, form, random_access, strict=True)
        if converted:
            metadata = replace(metadata, icc=bytes(self._image.get("icc-profile-data")))
        self.metadata = metadata
        self.notes = notes + converted
        self.width, self.height, self.channels = self._image.width, self._image.height, self._image.bands
        self.bits = bits_of(self._image)
        self._kept, self._kept_top = self._empty(0), 0
        self._failure: ImageError | None = None

    def rows(self, top: int, bottom: int) -> np.ndarray:
        """Returns rows `top` … `bottom` − 1 as (rows, width, channels) of uint8 or uint16.

        Without random access, `top` must not be smaller than in the previous call. Rows shared with the previous call
        are copied from its array, so callers must not change the returned array.
        """
        if not 0 <= top < bottom <= self.height:
            raise ImageError(f"{str(self.path)!r} has {self.height} rows: cannot read rows {top} to {bottom}.")
        if self._failure is not None:
            raise self._failure
        if self._random_access:
            return self._read(top, self._empty(bottom - top))
        if top < self._kept_top:
            raise ImageError(f"reading rows of {str(self.path)!r} upwards needs random access.")
        kept = self._kept[top - self._kept_top :]
        if len(kept) >= bottom - top:
            return kept[: bottom - top]
        band = self._empty(bottom - top)
        band[: len(kept)] = kept
        self._read(top + len(kept), band[len(kept) :])
        self._kept, self._kept_top = band, top
        return band

    def __exit__(self, *_: object) -> None:
        self._image, self._kept = None, self._empty(0)
        self._failure = ImageError(f"{str(self.path)!r} is closed.")

    def _empty(self, rows: int) -> np.ndarray:
        return np.empty((rows, self.width, self.channels), np.uint8 if self.bits == 8 else np.uint16)

    def _read(self, top: int, into: np.ndarray) -> np.ndarray:
        try:
            with explaining(_reading(self.path)):
                if self._is_blank:
                    self._image, self._is_blank = load_whole(self.path, self._form), False
                _fetch(self._image, top, into)
        except ImageError as error:
            flaw = _harmless_flaw(error) if self._strict and self._form.name == "jpeg" else ""
            if not flaw:
                # Later calls raise this error too, because the output of a decoder after an error is not valid.
                self._failure = error
                raise
            self._strict = False
            with explaining(_reading(self.path)):
                self._image, _ = decode(self.path, self._form, self._random_access, strict=False)
            self.notes += (f"the JPEG decoder warns: {flaw}",)
            return self._read(top, into)
        return into


def _reading(path: Path) -> str:
    return f"cannot read {str(path)!r}"


def _read_head(path: Path) -> bytes:
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            raise ImageError(f"{_reading(path)}: it is {'a folder' if stat.S_ISDIR(mode) else 'not a file'}.")
        with open(path, "rb") as file:
            return file.read(HEAD_BYTES)
    except OSError as error:
        reason = "it does not exist" if isinstance(error, FileNotFoundError) else error.strerror or error
        raise ImageError(f"{_reading(path)}: {reason}.") from error


def _load(path: Path, form: Format, sequential: bool, strict: bool) -> VipsImage:
    if form.loader == WHOLE:
        return load_header(path, form)
    access, fail_on = "sequential" if sequential else "random", "warning" if strict else "error"
    return load_vips().Operation.call(form.loader, os.fsencode(path), access=access, fail_on=fail_on)


def decode(path: Path, form: Format, random_access: bool, strict: bool) -> tuple[VipsImage, tuple[str, ...]]:
    """Returns the upright image and notes on conversions.

    The image is decoded on demand; an image of a format that is decoded as a whole is blank.
    """
    image = _load(path, form, not random_access, strict)
    if field(image, "orientation", 1) > 2:
        # Only upright images and images mirrored left to right can be read from the top down.
        image = _load(path, form, False, strict)
    return normalise(image.autorot(), path)


def _fetch(image: VipsImage, top: int, into: np.ndarray) -> None:
    # A region may only be used by the thread that created it, so each call creates one.
    region = load_vips().Region.new(image)
    for start in range(0, len(into), _ROWS_AT_ONCE):
        part = into[start : start + _ROWS_AT_ONCE]
        data = region.fetch(0, top + start, image.width, len(part))
        part[...] = np.frombuffer(data, into.dtype).reshape(part.shape)


def _harmless_flaw(error: ImageError) -> str:
    """Returns the warnings of a JPEG decoder if all of them are harmless, otherwise an empty string."""
    remarks = {line.partition(": ")[2] for line in getattr(error.__cause__, "detail", "").splitlines() if line.strip()}
    return "; ".join(sorted(remarks)) if all(_HARMLESS.search(remark) for remark in remarks) else ""


def _notes_on(image: VipsImage, path: Path, form: Format, head: bytes, metadata: Metadata) -> tuple[str, ...]:
    """Returns notes on the parts of the file that are not used, and on a suffix that belongs to another format."""
    notes = []
    if path.suffix.lower() not in form.suffixes:
        notes.append(f"it has {f'the suffix {path.suffix}' if path.suffix else 'no suffix'} but is {form.title}")
    pages = count_png_frames(path) if form.name == "png" else field(image, "n-pages", 1)
    if form.name == "avif" and b"avis" in brands_of(head):
        notes.append("animated: only the first frame is used")
    elif pages > 1:
        notes.append(
            {
                "tiff": f"only the first of {pages} pages is used",
                "avif": f"only the main image of {pages} is used",
                "heic": f"only the main image of {pages} is used",
            }.get(form.name, f"animated: only the first of {pages} frames is used")
        )
    if metadata.xmp is not None and b"hdrgm:" in metadata.xmp:
        notes.append("its HDR gain map was left out")
    return tuple(notes)

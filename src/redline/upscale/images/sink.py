"""Writes an image file row by row; the file appears under its name only when it is complete.

Encoders read rows on demand, so rows are collected first: small images in memory, large ones in a scratch file beside
the target. libvips then encodes from there strip by strip. The scratch file and the incomplete image have hidden names
(see `redline.files.partial`), so that the files of a killed run can be recognised and removed.

The default options of the formats are based on measurements with 17 megapixels of an upscaled photo on one core. PNG at
level 2 with the `up` filter took 0.65 s and 17.8 MB; with libvips' own defaults 1.2 s and 35 MB, and at level 6 1.7 s
and 15.5 MB. TIFF with LZW is as small as TIFF with deflate, takes half the time to write, and can be read by every
program. AVIF at effort 0 is 3% larger than at effort 2, and takes a sixth of the time to write.
"""

import os
import shutil
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from redline.files.partial import hidden_path
from redline.notation import format_bytes
from redline.upscale.images.formats import Format, ImageError, check_can_hold, format_for
from redline.upscale.images.metadata import Metadata, add_metadata, attach_metadata, fit_metadata
from redline.upscale.images.vips import VipsImage, explaining, load_vips, meaning_of

MEMORY_LIMIT_BYTES = 512 * 2**20

_UNEXPLAINED = "the encoder failed without a message"
_QUALITY = {"jpeg": 95, "webp": 90, "avif": 80}
_EFFORT = {"webp": 2, "avif": 0}
# Images with more uncompressed bytes than this are written as BigTIFF, because a TIFF file is limited to 4 GiB, and LZW
# can make noisy images 1.5 times as large.
_BIG_TIFF_BYTES = 2**31


@dataclass(frozen=True)
class Encoding:
    """Encoder options. A quality of None is the format's default; `lossless` applies to WebP and AVIF."""

    quality: int | None = None
    lossless: bool = False

    def __post_init__(self) -> None:
        if self.quality is not None and not 1 <= self.quality <= 100:
            raise ImageError(f"quality must be between 1 and 100, not {self.quality}.")


class ImageSink(AbstractContextManager["ImageSink"]):
    """Opens an image file for writing. Any thread may use it, one at a time.

    The suffix decides the format. `strip` omits all metadata except the colours. Raises `ImageError` if the format
    cannot hold the image or the disk is full.
    """

    def __init__(
        self,
        path: Path | str,
        width: int,
        height: int,
        channels: int,
        bits: int,
        encoding: Encoding | None = None,
        metadata: Metadata | None = None,
        strip: bool = False,
        memory_limit_bytes: int = MEMORY_LIMIT_BYTES,
    ) -> None:
        self.path, self.shape = Path(path), (height, width, channels)
        form, metadata = format_for(self.path), metadata or Metadata()
        if form.name == "avif" and metadata.depth is not None:
            # Writes a 10-bit source with 10 bits and not with 12, because more programs support 10-bit AVIF.
            form = replace(form, bits=min(form.bits, metadata.depth))
        notes = check_can_hold(form, width, height, channels, bits, metadata.depth)
        self._metadata, left_out = fit_metadata(metadata.stripped() if strip else metadata, form, width, height)
        self._form, self._encoding, self.notes = form, encoding or Encoding(), notes + left_out
        self._given = np.dtype(np.uint8 if bits == 8 else np.uint16)
        self._stored = np.dtype(samples_of(form, bits))
        self._written = 0
        self._memory: np.ndarray | None = None
        self._scratch: Path | None = None
        self._partial: Path | None = None
        try:
            with explaining(self._writing, _UNEXPLAINED):
                self._begin(memory_limit_bytes)
        except BaseException:
            self.abort()
            raise

    def write_rows(self, rows: np.ndarray) -> None:
        """Appends rows (any number, width, channels) of uint8 or uint16, according to `bits`."""
        rows = np.asarray(rows)
        height, width, channels = self.shape
        if self._partial is None:
            raise ImageError(f"{self._writing}: it is finished or aborted.")
        if rows.dtype != self._given or rows.shape[1:] != (width, channels) or rows.ndim != 3:
            raise ImageError(f"{self._writing}: rows of shape {rows.shape} and dtype {rows.dtype} do not fit.")
        if self._written + len(rows) > height:
            raise ImageError(f"{self._writing}: it has {height} rows, and {self._written + len(rows)} were given.")
        rounded = round_to(rows, self._form)
        if self._memory is not None:
            self._memory[self._written : self._written + len(rows)] = rounded
        elif self._scratch is not None:
            try:
                with explaining(self._writing), open(self._scratch, "ab") as file:
                    file.write(np.ascontiguousarray(rounded).data)
            except BaseException:
                # Part of the rows may have been written, so no more rows may follow.
                self.abort()
                raise
        self._written += len(rows)

    def finish(self) -> None:
        """Encodes the image, syncs it to disk and renames it; on an error, no file is left."""
        height, width, _ = self.shape
        if self._partial is None:
            raise ImageError(f"{self._writing}: it is finished or aborted.")
        try:
            if self._written < height:
                raise ImageError(f"{self._writing}: {self._written} of its {height} rows were given.")
            with explaining(self._writing, _UNEXPLAINED):
                image, keep = attach_metadata(self._collected(), self._metadata, self._form)
                encode(image, self._partial, self._form, self._encoding, keep)
                add_metadata(self._partial, self._metadata, self._form, width, height)
                with open(self._partial, "r+b") as file:
                    os.fsync(file.fileno())
                os.replace(self._partial, self.path)
            self._partial = None
        finally:
            self.abort()

    def abort(self) -> None:
        """Removes the incomplete files; does nothing after `finish`."""
        for path in filter(None, (self._partial, self._scratch)):
            with suppress(OSError):
                path.unlink(missing_ok=True)
        self._partial = self._scratch = self._memory = None

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.abort()
        elif self._partial is not None:
            self.finish()

    @property
    def _writing(self) -> str:
        return f"cannot write {str(self.path)!r}"

    def _begin(self, memory_limit_bytes: int) -> None:
        if self.path.is_dir():
            raise ImageError(f"{self._writing}: it is a folder.")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._partial = _create_hidden(self.path)
        size = int(np.prod(self.shape)) * self._stored.itemsize
        if size <= memory_limit_bytes:
            self._memory = np.empty(self.shape, self._stored)
            return
        free = shutil.disk_usage(self.path.parent).free
        if free < size:
            needs = f"{format_bytes(size)} of temporary space are needed, and {format_bytes(free)} are free"
            raise ImageError(f"{self._writing}: {needs}.")
        self._scratch = _create_hidden(self.path)

    def _collected(self) -> VipsImage:
        images = load_vips().Image
        height, width, channels = self.shape
        deep = self._stored.itemsize == 2
        kind = "ushort" if deep else "uchar"
        if self._memory is not None:
            image = images.new_from_memory(self._memory, width, height, channels, kind)
        else:
            image = images.rawload(os.fsencode(str(self._scratch)), width, height, channels, format=kind)
        return image.copy(interpretation=meaning_of(channels, deep))


def _create_hidden(path: Path) -> Path:
    """Creates an empty file with a hidden name beside the target."""
    hidden = hidden_path(path)
    hidden.touch(exist_ok=False)
    return hidden


def encode(image: VipsImage, path: Path, form: Format, encoding: Encoding, keep: int) -> None:
    """Writes the image in this format, regardless of the file name."""
    saver, options = _saver(image, form, encoding)
    load_vips().Operation.call(saver, image, os.fsencode(path), keep=keep, **options)


def _saver(image: VipsImage, form: Format, encoding: Encoding) -> tuple[str, dict[str, Any]]:
    deep = image.format == "ushort"
    if form.name == "png":
        return "pngsave", {"compression": 2, "filter": "up"}
    if form.name == "tiff":
        size = image.width * image.height * image.bands * (2 if deep else 1)
        return "tiffsave", {"compression": "lzw", "predictor": "horizontal", "bigtiff": size > _BIG_TIFF_BYTES}
    quality = _QUALITY[form.name] if encoding.quality is None else encoding.quality
    if form.name == "jpeg":
        return "jpegsave", {"Q": quality}
    options = {"Q": quality, "lossless": encoding.lossless, "effort": _EFFORT[form.name]}
    if form.name == "webp":
        # Without this option, the encoder discards the colour of transparent pixels.
        return "webpsave", options | {"exact": encoding.lossless}
    return "heifsave", options | {"compression": "av1", "bitdepth": form.bits if deep else 8}


def samples_of(form: Format, bits: int) -> Any:
    """Returns the dtype in which samples are stored for the encoder."""
    return np.uint16 if min(bits, form.bits) > 8 else np.uint8


def round_to(rows: np.ndarray, form: Format) -> np.ndarray:
    """Rounds 16-bit samples to the depth of the format; returns 8-bit samples unchanged."""
    if rows.dtype == np.uint8 or form.bits == 16:
        return rows
    most = 2**form.bits - 1
    nearest = (rows.astype(np.uint32) * most + 32767) // 65535
    # libvips expects 10- and 12-bit samples in the upper bits of 16.
    return nearest.astype(np.uint8) if form.bits == 8 else (nearest << (16 - form.bits)).astype(np.uint16)

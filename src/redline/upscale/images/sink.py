"""Writes an image file row by row; the file appears under its name only when it is complete.

Encoders read rows on demand, so rows are collected first: small images in memory, large ones in a scratch file beside
the target. libvips then encodes from there strip by strip.

The scratch file and the incomplete image have hidden names (see `partial`), so that the files of a killed run can be
recognised and removed.
"""

import os
import shutil
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from redline.files.partial import hidden_path
from redline.notation import format_bytes
from redline.upscale.images.encoding import Encoding, encode, round_to, samples_of
from redline.upscale.images.formats import ImageError, check_can_hold, format_for
from redline.upscale.images.metadata import Metadata, add_metadata, attach_metadata, fit_metadata
from redline.upscale.images.samples import meaning_of
from redline.upscale.images.vips import VipsImage, explaining, load_vips

MEMORY_LIMIT_BYTES = 512 * 2**20

_UNEXPLAINED = "the encoder failed without a message"


class ImageSink(AbstractContextManager["ImageSink"]):
    """Opens an image file for writing. Any thread may use it, one at a time.

    The suffix decides the format. `strip` leaves out all metadata but the colours. Raises `ImageError` if the format
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
            # A source of 10 bits stays at 10 bits, which more programs support than 12.
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
                _flush_to_disk(self._partial)
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
    os.close(os.open(hidden, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    return hidden


def _flush_to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

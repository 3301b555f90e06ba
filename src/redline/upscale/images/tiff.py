"""Copies EXIF and IPTC of TIFF files, which are stored among the tags of the image.

libvips leaves out EXIF and truncates IPTC to a quarter. So they are read from the source file and added to the file
that libvips wrote: the directories are appended and the header is pointed at them.
"""

import struct
from pathlib import Path
from typing import BinaryIO

from redline.upscale.images.exif import (
    ReadAt,
    Tag,
    pack_directories,
    read_block,
    read_directories,
    read_directory,
    read_entries,
    read_header,
    reordered,
    write_block,
)

# The tags of the main directory that describe the image and not its storage:
# description, make, model, software, date, artist, host, rating, copyright, and Windows' title to subject.
_DESCRIPTIVE = {0x010E, 0x010F, 0x0110, 0x0131, 0x0132, 0x013B, 0x013C, 0x4746, 0x8298, *range(0x9C9B, 0x9CA0)}
_DESCRIPTION = 0x010E
# tifffile writes the shape into the description, which is wrong for the upscaled image.
_OF_ANOTHER_SHAPE = b'{"shape":'
_IPTC, _PIXELS_ACROSS, _PIXELS_DOWN = 0x83BB, 0xA002, 0xA003
_LONG, _UNDEFINED = 4, 7
_COMPRESSION, _JPEGS, _PHOTOMETRIC, _YCBCR = 0x0103, (6, 7), 0x0106, 6


def read_from_tiff(path: Path) -> dict[str, bytes]:
    """Returns the EXIF block and the IPTC captions, as far as the file has any."""
    with open(path, "rb") as file:
        try:
            layout, (main, photo, gps) = read_directories(_in_file(file))
        except (ValueError, OSError, OverflowError):
            return {}
    told = {number: tag for number, tag in main.items() if number in _DESCRIPTIVE}
    if _DESCRIPTION in told and told[_DESCRIPTION].data.startswith(_OF_ANOTHER_SHAPE):
        del told[_DESCRIPTION]
    found = {}
    if told or photo or gps:
        found["exif"] = write_block(layout, (told, photo, gps))
    if _IPTC in main:
        found["iptc"] = main[_IPTC].data
    return found


def has_raw_ycbcr(path: Path) -> bool:
    """Returns whether samples are YCbCr without JPEG compression, which libvips does not convert to RGB."""
    with open(path, "rb") as file:
        try:
            read_at = _in_file(file)
            layout, offset = read_header(read_at)
            main = read_directory(read_at, offset, layout)
            photometric, compression = (layout.number(main[number].data) for number in (_PHOTOMETRIC, _COMPRESSION))
        except (ValueError, KeyError, OSError, OverflowError):
            return False
    return photometric == _YCBCR and compression not in _JPEGS


def add_to_tiff(path: Path, exif: bytes | None, iptc: bytes | None, width: int, height: int) -> None:
    """Adds the tags of an EXIF block, updated to this size, and IPTC to a file."""
    theirs, directories = read_block(exif or b"")
    with open(path, "r+b") as file:
        ours, first = read_header(_in_file(file))
        main, photo, gps = (
            {number: reordered(tag, theirs, ours) for number, tag in directory.items()} for directory in directories
        )
        entries = read_entries(_in_file(file), first, ours)
        taken = {ours.number(entry[:2]) for entry in entries}
        main = {number: tag for number, tag in main.items() if number in _DESCRIPTIVE - taken}
        if iptc is not None:
            main[_IPTC] = Tag(_UNDEFINED, len(iptc), iptc)
        for number, pixels in ((_PIXELS_ACROSS, width), (_PIXELS_DOWN, height)):
            if number in photo:
                photo[number] = Tag(_LONG, 1, struct.pack(ours.order + "I", pixels))
        end = file.seek(0, 2)
        packed, main_at = pack_directories((main, photo, gps), end + end % 2, ours, entries)
        file.write(b"\0" * (end % 2) + packed)
        file.seek(8 if ours.big else 4)
        file.write(ours.offset(main_at))


def _in_file(file: BinaryIO) -> ReadAt:
    def read_at(offset: int, length: int) -> bytes:
        file.seek(offset)
        return file.read(length)

    return read_at

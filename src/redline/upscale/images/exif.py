"""Reads and writes EXIF blocks, which are small TIFF files, and the EXIF and IPTC of TIFF files.

TIFF files consist of directories of tags. libvips leaves out the EXIF of TIFF files and truncates their IPTC to a
quarter. Therefore this module reads both from the source file and adds them to the file that libvips wrote: it appends
the directories and changes the offset in the header.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

_PREFIX = b"Exif\0\0"
_ORIENTATION, _PHOTO, _GPS = 0x0112, 0x8769, 0x8825
_DPI_ACROSS, _DPI_DOWN, _RESOLUTION_UNIT, _PER_CENTIMETRE = 0x011A, 0x011B, 0x0128, 3
_LONG, _UNDEFINED, _LONG8 = 4, 7, 18
# The tag that points to the interoperability directory, which is not copied.
_INTEROPERABILITY = 0xA005
# The size in bytes of each value type, and of the units that a change of byte order reverses (a rational is two 4-byte
# units).
SIZES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8, 17: 8, 18: 8}
_UNITS = SIZES | {5: 4, 10: 4}

# Limits on values, which protect against damaged files.
_MOST_TAGS, _LONGEST_BYTES = 1000, 2**20

ReadAt = Callable[[int, int], bytes]
# The tags of the main directory that describe the image and not its storage:
# description, make, model, software, date, artist, host, rating, copyright, and the Windows tags from title to subject.
_DESCRIPTIVE = {0x010E, 0x010F, 0x0110, 0x0131, 0x0132, 0x013B, 0x013C, 0x4746, 0x8298, *range(0x9C9B, 0x9CA0)}
_DESCRIPTION = 0x010E
# tifffile writes the array shape into the description, which would be wrong for the upscaled image.
_OF_ANOTHER_SHAPE = b'{"shape":'
_IPTC, _PIXELS_ACROSS, _PIXELS_DOWN = 0x83BB, 0xA002, 0xA003
_COMPRESSION, _JPEGS, _PHOTOMETRIC, _YCBCR = 0x0103, (6, 7), 0x0106, 6


@dataclass(frozen=True)
class Tag:
    """One directory entry: its values in the byte order of the file, and their offset in the file."""

    kind: int
    count: int
    data: bytes
    at: int = 0


Directory = dict[int, Tag]
Directories = tuple[Directory, Directory, Directory]


@dataclass(frozen=True)
class Layout:
    """The byte order, and whether the file is a BigTIFF, whose counts and offsets have eight bytes."""

    order: str
    big: bool

    @property
    def entry_bytes(self) -> int:
        return 20 if self.big else 12

    @property
    def offset_bytes(self) -> int:
        return 8 if self.big else 4

    @property
    def count_bytes(self) -> int:
        return 8 if self.big else 2

    def offset(self, number: int) -> bytes:
        return struct.pack(self.order + ("Q" if self.big else "I"), number)

    def number(self, data: bytes) -> int:
        """Converts two, four or eight bytes to a number."""
        return struct.unpack(self.order + {2: "H", 4: "I", 8: "Q"}[len(data)], data)[0]


def read_header(read_at: ReadAt) -> tuple[Layout, int]:
    """Returns the layout and the offset of the main directory; raises ValueError if it is not TIFF."""
    head = read_at(0, 16)
    signatures = {b"II*\0": ("<", False), b"MM\0*": (">", False), b"II+\0": ("<", True), b"MM\0+": (">", True)}
    if head[:4] in signatures:
        layout = Layout(*signatures[head[:4]])
        offset = head[8:16] if layout.big else head[4:8]
        if len(offset) == layout.offset_bytes:
            return layout, layout.number(offset)
    raise ValueError("no TIFF header")


def read_entries(read_at: ReadAt, offset: int, layout: Layout) -> list[bytes]:
    head = read_at(offset, layout.count_bytes)
    if len(head) < layout.count_bytes:
        return []
    step = layout.entry_bytes
    entries = read_at(offset + len(head), min(layout.number(head), _MOST_TAGS) * step)
    return [entries[at : at + step] for at in range(0, len(entries) - step + 1, step)]


def read_directory(read_at: ReadAt, offset: int, layout: Layout) -> Directory:
    """Returns the tags of a directory, without tags whose values are incomplete or too long."""
    found: Directory = {}
    for index, entry in enumerate(read_entries(read_at, offset, layout)):
        value = entry[-layout.offset_bytes :]
        kind, count = layout.number(entry[2:4]), layout.number(entry[4 : -len(value)])
        length = SIZES.get(kind, 0) * count
        if not 0 < length <= _LONGEST_BYTES:
            continue
        inside = offset + layout.count_bytes + (index + 1) * len(entry) - len(value)
        at = inside if length <= len(value) else layout.number(value)
        data = read_at(at, length)
        if len(data) == length:
            found[layout.number(entry[:2])] = Tag(kind, count, data, at)
    return found


def follow(directory: Directory, pointer: int, read_at: ReadAt, layout: Layout) -> Directory:
    """Returns the directory that the tag `pointer` points to, or an empty one if there is no such tag."""
    tag = directory.get(pointer)
    if tag is None or len(tag.data) not in (4, 8):
        return {}
    return read_directory(read_at, layout.number(tag.data), layout)


def pack(directory: Directory, at: int, layout: Layout, ready: list[bytes] | None = None) -> bytes:
    """Packs a directory to be stored at `at`, and adds the entries in `ready`. Long values follow the entries."""
    entries = {layout.number(entry[:2]): entry for entry in ready or []}
    count = len(entries) + len(directory)
    behind = at + layout.count_bytes + count * layout.entry_bytes + layout.offset_bytes
    values = b""
    for number, tag in directory.items():
        head = struct.pack(layout.order + ("HHQ" if layout.big else "HHI"), number, tag.kind, tag.count)
        if len(tag.data) <= layout.offset_bytes:
            entries[number] = head + tag.data.ljust(layout.offset_bytes, b"\0")
        else:
            entries[number] = head + layout.offset(behind + len(values))
            values += tag.data + b"\0" * (len(tag.data) % 2)
    head = struct.pack(layout.order + ("Q" if layout.big else "H"), count)
    return head + b"".join(entries[number] for number in sorted(entries)) + layout.offset(0) + values


def reordered(tag: Tag, theirs: Layout, ours: Layout) -> Tag:
    """Returns the tag with its values in the byte order `ours`."""
    unit = _UNITS[tag.kind]
    if theirs.order == ours.order or unit == 1:
        return tag
    return Tag(tag.kind, tag.count, b"".join(tag.data[at : at + unit][::-1] for at in range(0, len(tag.data), unit)))


def upright(block: bytes) -> bytes:
    """Returns the block with orientation 1 and without the second directory, which holds the old thumbnail."""
    body = bytearray(block.removeprefix(_PREFIX))
    read_at = in_bytes(body)
    try:
        layout, offset = read_header(read_at)
    except ValueError:
        return block
    end = offset + layout.count_bytes + len(read_entries(read_at, offset, layout)) * layout.entry_bytes
    if end + layout.offset_bytes <= len(body):
        body[end : end + layout.offset_bytes] = layout.offset(0)
    tag = read_directory(read_at, offset, layout).get(_ORIENTATION)
    if tag is not None and SIZES[tag.kind] <= 4:
        body[tag.at : tag.at + SIZES[tag.kind]] = struct.pack(layout.order + " BH I"[SIZES[tag.kind]], 1)
    return block[: len(block) - len(body)] + bytes(body)


def resolution(block: bytes) -> tuple[float, float] | None:
    """Returns the dots per inch in an EXIF block, the only place where WebP and AVIF store them."""
    read_at = in_bytes(block.removeprefix(_PREFIX))
    try:
        layout, offset = read_header(read_at)
    except ValueError:
        return None
    main = read_directory(read_at, offset, layout)
    found = [main[number].data for number in (_DPI_ACROSS, _DPI_DOWN) if number in main]
    pairs = [(layout.number(data[:4]), layout.number(data[4:])) for data in found if len(data) == 8]
    if len(pairs) < 2 or not all(over and under for over, under in pairs):
        return None
    unit = main.get(_RESOLUTION_UNIT)
    per = 2.54 if unit is not None and len(unit.data) == 2 and layout.number(unit.data) == _PER_CENTIMETRE else 1.0
    across, down = (over / under * per for over, under in pairs)
    return across, down


def read_block(block: bytes) -> tuple[Layout, Directories]:
    """Returns the tags of a block; empty directories if it is damaged."""
    try:
        return read_directories(in_bytes(block.removeprefix(_PREFIX)))
    except ValueError:
        return Layout("<", big=False), ({}, {}, {})


def write_block(layout: Layout, directories: Directories) -> bytes:
    block = Layout(layout.order, big=False)
    packed, main_at = pack_directories(directories, 8, block)
    return _PREFIX + (b"II*\0" if layout.order == "<" else b"MM\0*") + block.offset(main_at) + packed


def read_directories(read_at: ReadAt) -> tuple[Layout, Directories]:
    """Returns the layout, and the main, the photo and the GPS directory."""
    layout, offset = read_header(read_at)
    main = read_directory(read_at, offset, layout)
    photo, gps = (follow(main, pointer, read_at, layout) for pointer in (_PHOTO, _GPS))
    photo.pop(_INTEROPERABILITY, None)
    return layout, (main, photo, gps)


def pack_directories(
    directories: Directories, at: int, layout: Layout, ready: list[bytes] | None = None
) -> tuple[bytes, int]:
    """Packs the three directories one after the other from `at` on; returns them and the offset of the main one."""
    main, photo, gps = directories
    packed = b""
    for pointer, directory in ((_PHOTO, photo), (_GPS, gps)):
        if directory:
            main = main | {pointer: Tag(_LONG8 if layout.big else _LONG, 1, layout.offset(at + len(packed)))}
            packed += pack(directory, at + len(packed), layout)
    return packed + pack(main, at + len(packed), layout, ready), at + len(packed)


def in_bytes(body: bytes | bytearray) -> ReadAt:
    return lambda offset, length: bytes(body[offset : offset + length])


def read_from_tiff(path: Path) -> dict[str, bytes]:
    """Returns the EXIF block and the IPTC captions, if the file has them."""
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
    """Adds the tags of an EXIF block, updated to this image size, and IPTC captions to a TIFF file."""
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

"""Reads and writes EXIF blocks, which are small TIFF files."""

import struct

from redline.upscale.images.tags import (
    SIZES,
    Directory,
    Layout,
    ReadAt,
    Tag,
    follow,
    pack,
    read_directory,
    read_entries,
    read_header,
)

_PREFIX = b"Exif\0\0"
_ORIENTATION, _PHOTO, _GPS = 0x0112, 0x8769, 0x8825
_DPI_ACROSS, _DPI_DOWN, _RESOLUTION_UNIT, _PER_CENTIMETRE = 0x011A, 0x011B, 0x0128, 3
_LONG, _LONG8 = 4, 18
# A pointer to another directory, which is not copied.
_INTEROPERABILITY = 0xA005

Directories = tuple[Directory, Directory, Directory]


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
    """Returns dots per inch, which WebP and AVIF store only here."""
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

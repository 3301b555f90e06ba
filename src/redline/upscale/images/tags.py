"""Reads and writes directories of tags, the structure that TIFF files and EXIF blocks share."""

import struct
from collections.abc import Callable
from dataclasses import dataclass

# The size of a value in bytes by its type, and the size of the units that a change of byte order reverses.
SIZES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8, 17: 8, 18: 8}
_UNITS = SIZES | {5: 4, 10: 4}

# Limits for the values of damaged files.
_MOST_TAGS, _LONGEST_BYTES = 1000, 2**20

ReadAt = Callable[[int, int], bytes]


@dataclass(frozen=True)
class Tag:
    """One entry: its values in the byte order of the file, and their offset."""

    kind: int
    count: int
    data: bytes
    at: int = 0


Directory = dict[int, Tag]


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
    order = {b"II": "<", b"MM": ">"}.get(head[:2])
    if order is None or len(head) < 8:
        raise ValueError("no byte order")
    version = struct.unpack(order + "H", head[2:4])[0]
    if version == 42:
        return Layout(order, False), struct.unpack(order + "I", head[4:8])[0]
    if version == 43 and len(head) == 16:
        return Layout(order, True), struct.unpack(order + "Q", head[8:16])[0]
    raise ValueError("no TIFF version")


def read_entries(read_at: ReadAt, offset: int, layout: Layout) -> list[bytes]:
    """Returns the raw entries of a directory."""
    head = read_at(offset, layout.count_bytes)
    if len(head) < layout.count_bytes:
        return []
    step = layout.entry_bytes
    entries = read_at(offset + len(head), min(layout.number(head), _MOST_TAGS) * step)
    return [entries[at : at + step] for at in range(0, len(entries) - step + 1, step)]


def number_of(entry: bytes, layout: Layout) -> int:
    return layout.number(entry[:2])


def read_directory(read_at: ReadAt, offset: int, layout: Layout) -> Directory:
    """Returns the tags of a directory, without tags whose values are incomplete or too long."""
    found: Directory = {}
    for index, entry in enumerate(read_entries(read_at, offset, layout)):
        value = entry[-layout.offset_bytes :]
        kind, count = layout.number(entry[2:4]), layout.number(entry[4 : -len(value)])
        length = SIZES.get(kind, 0) * count
        if not 0 < length <= _LONGEST_BYTES:
            continue
        if length <= len(value):
            at = offset + layout.count_bytes + (index + 1) * len(entry) - len(value)
        else:
            at = layout.number(value)
        data = read_at(at, length)
        if len(data) == length:
            found[number_of(entry, layout)] = Tag(kind, count, data, at)
    return found


def follow(directory: Directory, pointer: int, read_at: ReadAt, layout: Layout) -> Directory:
    """Returns the directory that a tag points to, empty without such a tag."""
    tag = directory.get(pointer)
    if tag is None or len(tag.data) not in (4, 8):
        return {}
    return read_directory(read_at, layout.number(tag.data), layout)


def pack(directory: Directory, at: int, layout: Layout, ready: list[bytes] | None = None) -> bytes:
    """Packs a directory for offset `at`, including the packed entries in `ready`. Long values follow the entries."""
    entries = {number_of(entry, layout): entry for entry in ready or []}
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

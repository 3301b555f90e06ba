"""Tags in directories: the structure that TIFF files and EXIF blocks share, read and written without their meaning."""

import struct
from collections.abc import Callable
from dataclasses import dataclass

# Bytes of one value by its type, and the unit whose bytes are reversed between the two byte orders.
SIZES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8, 17: 8, 18: 8}
_UNITS = SIZES | {5: 4, 10: 4}

# What a damaged file may claim is believed up to here.
_MOST_TAGS, _LONGEST_BYTES = 1000, 2**20

ReadAt = Callable[[int, int], bytes]


@dataclass(frozen=True)
class Tag:
    """One entry: its values in the file's byte order, and where they lie."""

    kind: int
    count: int
    data: bytes
    at: int = 0


Directory = dict[int, Tag]


@dataclass(frozen=True)
class Layout:
    """Byte order, and whether it is BigTIFF, whose counts and offsets have eight bytes."""

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
        """Two, four or eight bytes as a number."""
        return struct.unpack(self.order + {2: "H", 4: "I", 8: "Q"}[len(data)], data)[0]


def read_header(read_at: ReadAt) -> tuple[Layout, int]:
    """The layout and where the main directory begins; ValueError when it is no TIFF structure."""
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
    """The entries of a directory as they lie there."""
    head = read_at(offset, layout.count_bytes)
    if len(head) < layout.count_bytes:
        return []
    step = layout.entry_bytes
    entries = read_at(offset + len(head), min(layout.number(head), _MOST_TAGS) * step)
    return [entries[at : at + step] for at in range(0, len(entries) - step + 1, step)]


def number_of(entry: bytes, layout: Layout) -> int:
    return layout.number(entry[:2])


def read_directory(read_at: ReadAt, offset: int, layout: Layout) -> Directory:
    """Every tag of a directory whose values are whole."""
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
    """The directory that a tag points to; empty without such a tag."""
    tag = directory.get(pointer)
    if tag is None or len(tag.data) not in (4, 8):
        return {}
    return read_directory(read_at, layout.number(tag.data), layout)


def pack(directory: Directory, at: int, layout: Layout, ready: list[bytes] | None = None) -> bytes:
    """A directory that begins at `at`, with the entries that are ready; longer values lie behind it."""
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
    """The tag with its values in the other file's byte order."""
    unit = _UNITS[tag.kind]
    if theirs.order == ours.order or unit == 1:
        return tag
    return Tag(tag.kind, tag.count, b"".join(tag.data[at : at + unit][::-1] for at in range(0, len(tag.data), unit)))

"""Directories of tags, in both byte orders and as BigTIFF, and the captions of Photoshop blocks."""

import struct
from collections.abc import Callable

import pytest

from redline.upscale.images.exif import Layout, Tag, follow, pack, read_directory, read_entries, read_header, reordered
from redline.upscale.images.metadata import unwrap, wrap

LAYOUTS = [Layout(order, big) for order in "<>" for big in (False, True)]


def reader(data: bytes) -> Callable[[int, int], bytes]:
    return lambda at, length: data[at : at + length]


def header(layout: Layout, first: int) -> bytes:
    order = b"II" if layout.order == "<" else b"MM"
    if layout.big:
        return order + struct.pack(layout.order + "HHHQ", 43, 8, 0, first)
    return order + struct.pack(layout.order + "HI", 42, first)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_what_is_packed_is_read_again(layout: Layout) -> None:
    begin = 16 if layout.big else 8
    tags = {
        300: Tag(3, 1, struct.pack(layout.order + "H", 7)),
        200: Tag(2, 13, b"thirteen char"),
        100: Tag(5, 2, struct.pack(layout.order + "4I", 1, 2, 3, 4)),
        34665: Tag(4, 1, struct.pack(layout.order + "I", begin)),
    }
    ready = pack({50: Tag(1, 1, b"r")}, 0, layout)[layout.count_bytes : layout.count_bytes + layout.entry_bytes]
    data = header(layout, begin) + pack(tags, begin, layout, [ready])
    found_layout, first = read_header(reader(data))
    assert (found_layout, first) == (layout, begin)
    found = read_directory(reader(data), first, layout)
    assert list(found) == [50, 100, 200, 300, 34665]
    for number, tag in tags.items():
        assert (found[number].kind, found[number].count, found[number].data) == (tag.kind, tag.count, tag.data)
        at = found[number].at
        assert data[at : at + len(tag.data)] == tag.data
    assert follow(found, 34665, reader(data), layout) == found
    assert follow(found, 300, reader(data), layout) == {} == follow(found, 1, reader(data), layout)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_directory_that_is_cut_off_gives_what_is_whole(layout: Layout) -> None:
    data = pack({1: Tag(1, 1, b"a"), 2: Tag(2, 30, b"b" * 30)}, 0, layout)
    assert list(read_directory(reader(data[:-1]), 0, layout)) == [1]
    entries_end = layout.count_bytes + 2 * layout.entry_bytes
    assert len(read_entries(reader(data[:entries_end]), 0, layout)) == 2
    assert len(read_entries(reader(data[: entries_end - 1]), 0, layout)) == 1
    assert read_entries(reader(data[: layout.count_bytes - 1]), 0, layout) == []


@pytest.mark.parametrize("length", [0, 2**20 + 1])
def test_what_a_damaged_file_claims_is_believed_up_to_a_limit(length: int) -> None:
    layout = Layout("<", False)
    data = pack({1: Tag(1, length, bytes(length))}, 0, layout)
    assert read_directory(reader(data), 0, layout) == {}
    longest = pack({1: Tag(1, 2**20, bytes(2**20))}, 0, layout)
    assert len(read_directory(reader(longest), 0, layout)[1].data) == 2**20


@pytest.mark.parametrize(
    "head", [b"", b"II*", b"XX*\0\0\0\0\0", b"II*\0\0\0\0", b"II,\0\0\0\0\0", b"II+\0" + bytes(11)]
)
def test_what_is_no_tiff_is_refused(head: bytes) -> None:
    with pytest.raises(ValueError):
        read_header(reader(head))


def test_values_are_put_in_the_other_byte_order() -> None:
    little, big = Layout("<", False), Layout(">", False)
    rational = Tag(5, 1, struct.pack("<2I", 1, 2))
    assert reordered(rational, little, big).data == struct.pack(">2I", 1, 2)
    assert reordered(Tag(12, 1, struct.pack("<d", 0.5)), little, big).data == struct.pack(">d", 0.5)
    for tag, order in ((Tag(2, 3, b"abc"), big), (rational, little)):
        assert reordered(tag, little, order) is tag


@pytest.mark.parametrize("captions", [b"even", b"odd"])
@pytest.mark.parametrize("name", [b"", b"a", b"ab"])
def test_captions_are_found_behind_other_resources(captions: bytes, name: bytes) -> None:
    def resource(number: int, data: bytes) -> bytes:
        counted = bytes([len(name)]) + name
        counted += b"\0" * (len(counted) % 2)
        return (
            b"8BIM"
            + struct.pack(">H", number)
            + counted
            + struct.pack(">I", len(data))
            + data
            + b"\0" * (len(data) % 2)
        )

    head = b"Photoshop 3.0\0"
    assert unwrap(head + resource(1, b"xyz") + resource(0x404, captions) + resource(2, b"")) == captions
    assert unwrap(wrap(captions)) == captions and len(wrap(captions)) % 2 == 0
    assert unwrap(head + resource(1, b"xyz")) is None and unwrap(head + resource(0x404, b"")) is None
    whole = head + resource(1, b"xyz")
    assert all(unwrap(whole[:end]) is None for end in range(len(head), len(whole)))
    assert unwrap(captions) == captions

"""Tells whether a file's end is missing, before hours of work: MP4, Matroska and AVI say how long they are, and MPEG-TS
is made of packets of one length."""

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_BOXES = b"ftyp moov mdat free skip wide moof mfra uuid sidx styp meta pnot".split()
_EBML, _SEGMENT = bytes.fromhex("1A45DFA3"), bytes.fromhex("18538067")
_CLUSTER = bytes.fromhex("1F43B675")
# The parts of a segment, each with an id of four bytes; those of a cluster have shorter ids.
_LONGEST_ID = 4
# MPEG-TS packets begin with this byte; on Blu-ray and in cameras four bytes of time come before each.
_TS_SYNC, _TS_PACKETS = 0x47, ((0, 188), (4, 192))
_RIFF, _RIFF_KINDS = b"RIFF", (b"AVI ", b"AVIX")


def missing_bytes(path: Path) -> int:
    """How much of the file is missing at its end, as far as its container tells; 0 where it does not."""
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(4 * 192)
        if start[:4] == _EBML:
            end = _end_of_matroska(file, size_bytes)
        elif start[:4] == _RIFF:
            end = _end_of_avi(file, size_bytes)
        elif (packet := _ts_packet(start)) is not None:
            end = _end_of_ts(file, size_bytes, *packet)
        else:
            end = _end_of_mp4(file, size_bytes)
    return max(0, end - size_bytes)


def complete_bytes(path: Path) -> int:
    """Returns where the last whole piece of an unfinished recording ends: a fragment of MP4 or an element of Matroska.

    This is the size of the file if all are whole."""
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        if file.read(len(_EBML)) == _EBML:
            ends = _ends_of_elements(file, size_bytes) if _enter_segment(file) is None else iter(())
        else:
            # Behind its head (moof), a fragment's data.
            ends = (end for kind, end in _boxes(file, size_bytes) if kind in (b"moov", b"mdat"))
        return max((end for end in ends if end <= size_bytes), default=size_bytes)


def _end_of_mp4(file: BinaryIO, size_bytes: int) -> int:
    return max((end for _, end in _boxes(file, size_bytes)), default=0)


def _boxes(file: BinaryIO, size_bytes: int) -> Iterator[tuple[bytes, int]]:
    """The kind and the end of each; what is no known box is something that was appended, and is not judged."""
    offset = 0
    while offset < size_bytes:
        file.seek(offset)
        header = file.read(16)
        if header[4:8] not in _BOXES:
            return
        length = int.from_bytes(header[:4])
        if length == 1:
            length = int.from_bytes(header[8:16])
        if length < 8:
            return
        offset += length
        yield header[4:8], offset


def _end_of_avi(file: BinaryIO, size_bytes: int) -> int:
    """One list, or several of about a gigabyte; a recorder that did not come to its end left their lengths at 0."""
    offset = 0
    while offset < size_bytes:
        file.seek(offset)
        header = file.read(12)
        length = int.from_bytes(header[4:8], "little")
        if header[:4] != _RIFF or header[8:] not in _RIFF_KINDS or not length:
            break
        offset += 8 + length
    return offset


def _end_of_matroska(file: BinaryIO, size_bytes: int) -> int:
    """The head, and one segment that holds the rest; its length is unknown where a recorder was ended early."""
    length = _enter_segment(file)
    return max(_ends_of_elements(file, size_bytes), default=0) if length is None else file.tell() + length


def _enter_segment(file: BinaryIO) -> int | None:
    """Goes to the content of the segment and returns its length: 0 if there is no segment, None if it is unknown."""
    file.seek(len(_EBML))
    head = _length(file)
    if head is None:
        return 0
    file.seek(head, 1)
    return _length(file) if file.read(len(_SEGMENT)) == _SEGMENT else 0


def _ends_of_elements(file: BinaryIO, size_bytes: int) -> Iterator[int]:
    """The ends of the elements of a segment, and of those in clusters of unknown length."""
    offset = file.tell()
    while offset < size_bytes:
        file.seek(offset)
        first = file.read(1)
        more = 8 - first[0].bit_length()
        if more >= _LONGEST_ID:
            return  # no element, but something that was appended
        name, length = first + file.read(more), _length(file)
        if length is None and name != _CLUSTER:
            if file.tell() >= size_bytes:
                yield size_bytes + 1
            return
        offset = file.tell() + (length or 0)
        yield offset


def _ts_packet(start: bytes) -> tuple[int, int] | None:
    """Returns where the first byte of a packet is, and how long packets are; None if this is not MPEG-TS."""
    for offset, length in _TS_PACKETS:
        syncs = start[offset::length]
        if len(syncs) > 2 and set(syncs) == {_TS_SYNC}:
            return offset, length
    return None


def _end_of_ts(file: BinaryIO, size_bytes: int, offset: int, length: int) -> int:
    """The end of the last packet, where that is cut off; one that does not begin in its place is not judged."""
    last = size_bytes // length * length
    file.seek(max(0, last - length + offset))
    tail = file.read()
    syncs = tail[::length]
    is_aligned = len(syncs) == 2 and set(syncs) == {_TS_SYNC}
    return last + length if last < size_bytes and is_aligned else size_bytes


def _length(file: BinaryIO) -> int | None:
    """A number of 1 to 8 bytes, the leading zero bits of the first telling how many; all ones: not known."""
    first = file.read(1)
    if not first or not first[0]:
        return None
    extra = 8 - first[0].bit_length()
    value = int.from_bytes(first + file.read(extra)) & ((1 << 7 * (extra + 1)) - 1)
    return None if value == (1 << 7 * (extra + 1)) - 1 else value

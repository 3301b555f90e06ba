"""Detects truncated video files: MP4, Matroska and AVI declare their length, MPEG-TS has packets of equal length."""

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_BOXES = b"ftyp moov mdat free skip wide moof mfra uuid sidx styp meta pnot".split()
_EBML, _SEGMENT = bytes.fromhex("1A45DFA3"), bytes.fromhex("18538067")
_CLUSTER = bytes.fromhex("1F43B675")
# The elements of a segment have ids of up to four bytes.
_LONGEST_ID = 4
# MPEG-TS packets start with this byte; Blu-ray discs and cameras put a timestamp of four bytes before it.
_TS_SYNC, _TS_PACKETS = 0x47, ((0, 188), (4, 192))
_RIFF, _RIFF_KINDS = b"RIFF", (b"AVI ", b"AVIX")


def missing_bytes(path: Path) -> int:
    """Returns how many bytes are missing at the end of the file; 0 if this is unknown."""
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
            end = max((end for _, end in _boxes(file, size_bytes)), default=0)  # MP4
    return max(0, end - size_bytes)


def complete_bytes(path: Path) -> int:
    """Returns where the last complete fragment (MP4) or element (Matroska) of an unfinished recording ends.

    This is the size of the file if all fragments or elements are complete.
    """
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        if file.read(len(_EBML)) == _EBML:
            ends = _element_ends(file, size_bytes) if _enter_segment(file) is None else iter(())
        else:
            # A fragment is a header (moof) and then its data (mdat), so it is complete where the mdat box ends.
            ends = (end for kind, end in _boxes(file, size_bytes) if kind in (b"moov", b"mdat"))
        return max((end for end in ends if end <= size_bytes), default=size_bytes)


def _boxes(file: BinaryIO, size_bytes: int) -> Iterator[tuple[bytes, int]]:
    """Yields the type and the end of each box, up to the first unknown one, which may be appended data."""
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
    """Returns the end of the last RIFF list. A length of 0, left by an interrupted recorder, ends the search."""
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
    """Returns the end of the segment, whose length is unknown if the recorder was interrupted."""
    length = _enter_segment(file)
    return max(_element_ends(file, size_bytes), default=0) if length is None else file.tell() + length


def _enter_segment(file: BinaryIO) -> int | None:
    """Seeks to the content of the segment. Returns its length: 0 if there is no segment, None if it is unknown."""
    file.seek(len(_EBML))
    head = _length(file)
    if head is None:
        return 0
    file.seek(head, 1)
    return _length(file) if file.read(len(_SEGMENT)) == _SEGMENT else 0


def _element_ends(file: BinaryIO, size_bytes: int) -> Iterator[int]:
    """Yields the ends of the elements of a segment, including those in clusters of unknown length."""
    offset = file.tell()
    while offset < size_bytes:
        file.seek(offset)
        first = file.read(1)
        more = 8 - first[0].bit_length()
        if more >= _LONGEST_ID:
            return  # the rest is data that was appended to the file
        name, length = first + file.read(more), _length(file)
        if length is None and name != _CLUSTER:
            if file.tell() >= size_bytes:
                yield size_bytes + 1
            return
        offset = file.tell() + (length or 0)
        yield offset


def _ts_packet(start: bytes) -> tuple[int, int] | None:
    """Returns the offset of the sync byte in a packet, and the packet length; None if this is not MPEG-TS."""
    for offset, length in _TS_PACKETS:
        syncs = start[offset::length]
        if len(syncs) > 2 and set(syncs) == {_TS_SYNC}:
            return offset, length
    return None


def _end_of_ts(file: BinaryIO, size_bytes: int, offset: int, length: int) -> int:
    """Returns where a truncated last packet would end. Returns the file size if the last packet is complete, or if a
    sync byte is not at its expected position."""
    last = size_bytes // length * length
    file.seek(max(0, last - length + offset))
    tail = file.read()
    syncs = tail[::length]
    is_aligned = len(syncs) == 2 and set(syncs) == {_TS_SYNC}
    return last + length if last < size_bytes and is_aligned else size_bytes


def _length(file: BinaryIO) -> int | None:
    """Reads a variable-length integer of 1 to 8 bytes; the leading zero bits of the first byte give the length.

    Returns None if all bits are ones, which means unknown.
    """
    first = file.read(1)
    if not first or not first[0]:
        return None
    extra = 8 - first[0].bit_length()
    value = int.from_bytes(first + file.read(extra)) & ((1 << 7 * (extra + 1)) - 1)
    return None if value == (1 << 7 * (extra + 1)) - 1 else value

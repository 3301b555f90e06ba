"""Whether a file's end is missing, told before hours of work: MP4, Matroska and AVI say how long they are."""

from pathlib import Path
from typing import BinaryIO

_BOXES = b"ftyp moov mdat free skip wide moof mfra uuid sidx styp meta pnot".split()
_EBML, _SEGMENT = bytes.fromhex("1A45DFA3"), bytes.fromhex("18538067")
_RIFF, _RIFF_KINDS = b"RIFF", (b"AVI ", b"AVIX")


def missing_bytes(path: Path) -> int:
    """How much of the file is missing at its end, as far as its container tells; 0 where it does not."""
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if start[:4] == _EBML:
            end = _end_of_matroska(file)
        elif start[:4] == _RIFF:
            end = _end_of_avi(file, size_bytes)
        else:
            end = _end_of_mp4(file, size_bytes)
    return max(0, end - size_bytes)


def _end_of_mp4(file: BinaryIO, size_bytes: int) -> int:
    """Follows the boxes; what is no known box is something that was appended, and is not judged."""
    offset = 0
    while offset < size_bytes:
        file.seek(offset)
        header = file.read(16)
        if header[4:8] not in _BOXES:
            break
        length = int.from_bytes(header[:4])
        if length == 1:
            length = int.from_bytes(header[8:16])
        if length < 8:
            break
        offset += length
    return offset


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


def _end_of_matroska(file: BinaryIO) -> int:
    """The head, and one segment that holds the rest."""
    file.seek(len(_EBML))
    head = _length(file)
    if head is None:
        return 0
    file.seek(head, 1)
    if file.read(len(_SEGMENT)) != _SEGMENT:
        return 0
    length = _length(file)
    return 0 if length is None else file.tell() + length


def _length(file: BinaryIO) -> int | None:
    """A number of 1 to 8 bytes, the leading zero bits of the first telling how many; all ones: not known."""
    first = file.read(1)
    if not first or not first[0]:
        return None
    extra = 8 - first[0].bit_length()
    value = int.from_bytes(first + file.read(extra)) & ((1 << 7 * (extra + 1)) - 1)
    return None if value == (1 << 7 * (extra + 1)) - 1 else value

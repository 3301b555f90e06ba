"""Inserts bytes into the middle of a file in place."""

from typing import BinaryIO

_PIECE_BYTES = 4 * 2**20


def insert(file: BinaryIO, at: int, data: bytes) -> None:
    """Moves the data after `at` piece by piece, last piece first, and writes the new bytes there."""
    end = file.seek(0, 2)
    for start in reversed(range(at, end, _PIECE_BYTES)):
        file.seek(start)
        piece = file.read(min(_PIECE_BYTES, end - start))
        file.seek(start + len(data))
        file.write(piece)
    file.seek(at)
    file.write(data)

"""More bytes in the middle of a file that an encoder has written, in place: no second file, and little memory."""

from typing import BinaryIO

_PIECE_BYTES = 4 * 2**20


def insert(file: BinaryIO, at: int, data: bytes) -> None:
    """Moves what lies behind `at` from the end on, so that nothing is overwritten before it is read."""
    end = file.seek(0, 2)
    for start in reversed(range(at, end, _PIECE_BYTES)):
        file.seek(start)
        piece = file.read(min(_PIECE_BYTES, end - start))
        file.seek(start + len(data))
        file.write(piece)
    file.seek(at)
    file.write(data)

"""Writes and reads shards of tokens: memory-mapped files whose size and checksums are verified when they are opened.

    header: magic, version, bytes of a token, vocabulary, tokens, documents, checksums of the body and of the header
    body:   the tokens (16 bits each where the vocabulary allows), where each document starts and the last one ends,
            and a fingerprint of each document's text

The document boundaries let batches mask documents from each other. The fingerprints let the validation split choose
the same documents whatever the order of the corpus.
"""

import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from redline.errors import RedlineError
from redline.files.atomic import write_bytes
from redline.files.untrusted import reader

_MAGIC = b"RLTOKENS"
_VERSION = 1
_HEADER = struct.Struct("<8sIIQQQI")
_CHECKSUM = struct.Struct("<I")
_BODY = 64  # where the body begins


@dataclass(frozen=True)
class Shard:
    """An open shard; `tokens[starts[i]:starts[i + 1]]` is document i."""

    tokens: np.ndarray
    starts: np.ndarray
    fingerprints: np.ndarray
    vocabulary: int
    checksum: int


def write_shard(path: Path, documents: list[np.ndarray], fingerprints: list[int], vocabulary: int) -> None:
    """Writes a shard atomically."""
    kind = np.dtype("<u2" if vocabulary <= 2**16 else "<u4")
    starts = np.zeros(len(documents) + 1, dtype="<u8")
    np.cumsum([len(document) for document in documents], out=starts[1:])
    tokens = np.concatenate(documents)
    if int(tokens.max()) >= vocabulary:
        raise RedlineError(f"token {int(tokens.max())} is outside the vocabulary of {vocabulary}.")
    body = tokens.astype(kind).tobytes()
    body += b"\0" * (-len(body) % 8) + starts.tobytes() + np.array(fingerprints, dtype="<u8").tobytes()
    counts = (vocabulary, len(tokens), len(documents))
    header = _HEADER.pack(_MAGIC, _VERSION, kind.itemsize, *counts, zlib.crc32(body))
    header += _CHECKSUM.pack(zlib.crc32(header))
    write_bytes(path, header.ljust(_BODY, b"\0") + body)


@reader("shard")
def open_shard(path: Path) -> Shard:
    """Maps a shard into memory after checking its size and both checksums."""
    with open(path, "rb") as file:
        header = file.read(_BODY)
    size = path.stat().st_size
    if header[: len(_MAGIC)] != _MAGIC:
        raise RedlineError(f"{str(path)!r} is not a shard of tokens.")
    if len(header) < _BODY:
        raise RedlineError(f"the shard {str(path)!r} is truncated: it ends within its header.")
    (checked,) = _CHECKSUM.unpack_from(header, _HEADER.size)
    if checked != zlib.crc32(header[: _HEADER.size]):
        raise RedlineError(f"the header of the shard {str(path)!r} is damaged.")
    _, version, width, vocabulary, tokens, documents, checksum = _HEADER.unpack_from(header)
    if version != _VERSION:
        raise RedlineError(f"the shard {str(path)!r} has version {version}, and this Redline reads version {_VERSION}.")
    if width not in (2, 4):
        raise RedlineError(f"the shard {str(path)!r} is damaged: its tokens have {width} bytes, not 2 or 4.")
    first = _BODY + tokens * width + -(tokens * width) % 8
    expected = first + 8 * (documents + 1) + 8 * documents
    if size != expected:
        problem = "truncated" if size < expected else "too long"
        raise RedlineError(
            f"the shard {str(path)!r} is {problem}: it has {size:,} bytes, and its header says {expected:,}."
        )
    whole = np.memmap(path, dtype=np.uint8, mode="r")
    if zlib.crc32(whole[_BODY:].data) != checksum:
        raise RedlineError(f"the shard {str(path)!r} is damaged: its checksum does not match.")
    starts_end = first + 8 * (documents + 1)
    return Shard(
        whole[_BODY : _BODY + tokens * width].view("<u2" if width == 2 else "<u4"),
        np.array(whole[first:starts_end].view("<u8"), dtype=np.int64),
        np.array(whole[starts_end:].view("<u8")),
        vocabulary,
        checksum,
    )

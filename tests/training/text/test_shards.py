"""A shard gives back what was put in, and is refused when it is cut off, damaged or something else."""

from pathlib import Path

import numpy as np
import pytest

from redline.errors import RedlineError
from redline.training.text.shards import open_shard, write_shard


def documents(count: int, vocabulary: int) -> list[np.ndarray]:
    random = np.random.default_rng()
    return [random.integers(0, vocabulary, random.integers(1, 40)).astype(np.uint32) for _ in range(count)]


@pytest.mark.parametrize(("vocabulary", "width"), [(300, 2), (65_536, 2), (65_537, 4)])
def test_round_trip(tmp_path: Path, vocabulary: int, width: int) -> None:
    written, prints = documents(17, vocabulary), [2**64 - 1 - i for i in range(17)]
    write_shard(tmp_path / "a.bin", written, prints, vocabulary)
    shard = open_shard(tmp_path / "a.bin")
    assert shard.vocabulary == vocabulary and shard.tokens.dtype.itemsize == width
    assert isinstance(shard.tokens.base, np.memmap) and list(shard.fingerprints) == prints
    for i, document in enumerate(written):
        assert np.array_equal(shard.tokens[shard.starts[i] : shard.starts[i + 1]], document)
    assert [file.name for file in tmp_path.iterdir()] == ["a.bin"]


def test_a_token_outside_the_vocabulary_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(RedlineError, match="token 300 is outside the vocabulary of 300"):
        write_shard(tmp_path / "a.bin", [np.array([1, 300])], [1], 300)
    assert not list(tmp_path.iterdir())


def test_every_truncation_and_every_flipped_byte_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    write_shard(path, documents(3, 500), [1, 2, 3], 500)
    whole = path.read_bytes()
    for size in {0, 7, 30, 63, 64, 70, len(whole) - 1}:
        path.write_bytes(whole[:size])
        with pytest.raises(RedlineError, match="truncated|not a shard"):
            open_shard(path)
    path.write_bytes(whole + b"x")
    with pytest.raises(RedlineError, match="too long"):
        open_shard(path)
    padding = range(48, 64)  # of the header, which holds nothing
    for place in set(range(len(whole))) - set(padding):
        spoilt = bytearray(whole)
        spoilt[place] ^= 0x10
        path.write_bytes(spoilt)
        with pytest.raises(RedlineError, match="damaged|not a shard|truncated|too long|version"):
            open_shard(path)


def test_a_foreign_file_and_a_newer_version_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(RedlineError, match="is not a shard of tokens"):
        open_shard(path)
    with pytest.raises(RedlineError, match="cannot read the shard"):
        open_shard(tmp_path / "absent.bin")

"""The number of missing bytes by container format."""

from pathlib import Path

import pytest

from redline.video.truncated import missing_bytes

EBML, SEGMENT = bytes.fromhex("1A45DFA3"), bytes.fromhex("18538067")


def box(kind: bytes, length: int, *, long: bool = False) -> bytes:
    if long:
        return (1).to_bytes(4) + kind + length.to_bytes(8) + bytes(length - 16)
    return length.to_bytes(4) + kind + bytes(length - 8)


def riff(kind: bytes, length: int) -> bytes:
    return b"RIFF" + length.to_bytes(4, "little") + kind + bytes(length - 4)


MP4 = box(b"ftyp", 24) + box(b"mdat", 40, long=True) + box(b"moov", 30)
AVI = riff(b"AVI ", 100) + riff(b"AVIX", 60)
# A head of 3 bytes, and a segment of 200, its length once in one byte more than it needs.
MATROSKA = EBML + b"\x83abc" + SEGMENT + b"\x40\xc8" + bytes(200)
SHORT_LENGTH = EBML + b"\x83abc" + SEGMENT + b"\xe4" + bytes(100)


@pytest.mark.parametrize("whole", [MP4, AVI, MATROSKA, SHORT_LENGTH], ids=["mp4", "avi", "matroska", "one byte"])
def test_what_is_cut_off_is_counted(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "film"
    path.write_bytes(whole)
    assert missing_bytes(path) == 0
    for missing in (1, 13):
        path.write_bytes(whole[:-missing])
        assert missing_bytes(path) == missing
    path.write_bytes(whole + b"appended by somebody")
    assert missing_bytes(path) == 0


@pytest.mark.parametrize(
    "unknown",
    [
        b"",
        b"no container at all",
        box(b"ftyp", 24) + (0).to_bytes(4) + b"mdat" + bytes(20),
        box(b"ftyp", 24) + (7).to_bytes(4) + b"mdat" + bytes(20),
        b"RIFF" + (0).to_bytes(4, "little") + b"AVI " + bytes(20),
        b"RIFF" + (100).to_bytes(4, "little") + b"WAVE" + bytes(20),
        EBML,
        EBML + b"\x00" + bytes(9),
        EBML + b"\x83abc" + b"none" + b"\xe4",
        EBML + b"\x83abc" + SEGMENT,
        EBML + b"\x83abc" + SEGMENT + b"\xff" + bytes(20),
        EBML + b"\x83abc" + SEGMENT + b"\x01" + b"\xff" * 7 + bytes(20),
    ],
)
def test_a_container_that_does_not_say_is_not_judged(unknown: bytes, tmp_path: Path) -> None:
    path = tmp_path / "film"
    path.write_bytes(unknown)
    assert missing_bytes(path) == 0


def test_the_smallest_box_is_followed(tmp_path: Path) -> None:
    path = tmp_path / "film"
    path.write_bytes(box(b"ftyp", 8) + box(b"free", 8) + (20).to_bytes(4) + b"moov" + bytes(2))
    assert missing_bytes(path) == 10

"""Comments of JPEG files reach JPEG files, and a note says where they cannot."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from redline.upscale.images.metadata import add_comments, read_comments

Make = Callable[..., np.ndarray]
Copy = Callable[..., tuple[str, ...]]

COMMENTS = (b"caf\xe9", b"", b"x" * 65_533)


@pytest.fixture
def source(tmp_path: Path, samples: Make) -> Path:
    Image.fromarray(samples(30, 40, 3)).save(tmp_path / "a.jpg", xmp=b"<x/>")
    add_comments(tmp_path / "a.jpg", COMMENTS)
    return tmp_path / "a.jpg"


def test_comments_reach_a_jpeg(source: Path, tmp_path: Path, copy: Copy) -> None:
    assert copy(source, tmp_path / "b.jpg") == () and read_comments(tmp_path / "b.jpg") == COMMENTS
    with Image.open(tmp_path / "b.jpg") as image:
        image.load()
        # Another reader finds the last of them, and what has to come before.
        assert image.info["comment"] == COMMENTS[-1] and image.info["xmp"] == b"<x/>"
    assert copy(source, tmp_path / "c.jpg", strip=True) == () and read_comments(tmp_path / "c.jpg") == ()


@pytest.mark.parametrize("written", ["png", "webp", "tif", "avif"])
def test_a_note_says_where_they_cannot(source: Path, tmp_path: Path, written: str, copy: Copy) -> None:
    (note,) = copy(source, tmp_path / f"b.{written}")
    assert note.endswith("cannot hold JPEG comments, which were left out")


def test_damaged_files_have_fewer(source: Path, tmp_path: Path) -> None:
    whole = source.read_bytes()
    for end in (0, 1, 3, 25, 70_000):
        (tmp_path / "cut.jpg").write_bytes(whole[:end])
        assert len(read_comments(tmp_path / "cut.jpg")) <= len(COMMENTS)

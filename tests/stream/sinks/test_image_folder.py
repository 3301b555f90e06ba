"""Frames written to a folder are read back unchanged, and a folder holds one clip only."""

from pathlib import Path

import pytest
import torch

from redline.errors import RedlineError
from redline.stream.sinks import NullSink
from redline.stream.sinks.image_folder import ImageFolderSink
from redline.stream.sources.image_folder import ImageFolder
from redline.stream.sources.synthetic import SyntheticClip


def test_a_folder_round_trip_is_exact(tmp_path: Path) -> None:
    clip = list(SyntheticClip(7, 5, count=12).frames())
    sink = ImageFolderSink(tmp_path / "out")
    for frame in clip:
        sink.write(frame)
    sink.close()
    back = list(ImageFolder(tmp_path / "out").frames())
    assert len(back) == 12
    assert all(torch.equal(a.pixels, b.pixels) for a, b in zip(clip, back, strict=True))
    assert {path.name for path in (tmp_path / "out").iterdir()} == {f"frame_{index:08d}.png" for index in range(12)}


def test_a_folder_that_is_not_empty_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RedlineError, match=r"is not empty: give a new or an empty folder\.$"):
        ImageFolderSink(tmp_path)
    with pytest.raises(RedlineError, match=r"is not a folder\.$"):
        ImageFolderSink(tmp_path / "file")


def test_a_folder_that_may_not_be_written_to_is_reported_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)
    for folder in (tmp_path, tmp_path / "new" / "pictures"):
        with pytest.raises(RedlineError, match=r"^cannot write into '.*': permission denied\.$"):
            ImageFolderSink(folder)
    assert list(tmp_path.iterdir()) == []


def test_null_counts() -> None:
    sink = NullSink()
    for frame in SyntheticClip(2, 2, count=3).frames():
        sink.write(frame)
    sink.close()
    assert sink.frames == 3

"""Test clips are what they say they are; folders are read in a person's order; pacing follows the clock."""

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from redline.errors import RedlineError
from redline.stream.sources.image_folder import ImageFolder
from redline.stream.sources.paced import Paced
from redline.stream.sources.synthetic import SyntheticClip
from stream.clocks import ManualClock


def test_a_test_clip_moves_as_it_says() -> None:
    clip = SyntheticClip(33, 47, count=60, motion=(-2, 3), seed=5)
    frames = list(clip.frames())
    assert len(frames) == 60 and frames[7].time_s == Fraction(7, 25)
    for frame in frames:
        assert torch.equal(frame.pixels, frames[0].pixels.roll((-2 * frame.index, 3 * frame.index), (0, 1)))
    assert not torch.equal(frames[0].pixels, frames[1].pixels)
    assert frames[0].pixels.float().std() > 20


def test_the_seed_decides_the_clip() -> None:
    first, again, other = (next(SyntheticClip(9, 8, seed=seed).frames()).pixels for seed in (3, 3, 4))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert next(SyntheticClip(1, 1).frames()).pixels.shape == (1, 1, 3)


def test_a_clip_without_size_is_refused() -> None:
    with pytest.raises(RedlineError, match=r"needs a size.*\.$"):
        SyntheticClip(0, 8)
    for size in ((16_385, 8), (8, 20_000)):
        with pytest.raises(RedlineError, match=rf"at most 16384 pixels a side, not {size[1]}×{size[0]}\.$"):
            SyntheticClip(*size)


def test_a_clip_takes_no_memory_before_its_first_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr("redline.stream.sources.synthetic._pattern", lambda *size: made.append(size))
    SyntheticClip(16_000, 16_000, seed=3)
    assert made == []


def test_a_live_clip_is_paced_by_the_clock_without_drifting() -> None:
    clock = ManualClock()
    source = Paced(SyntheticClip(8, 8, count=5, rate=Fraction(10)), clock)
    assert source.is_live
    captured = []
    for frame in source.frames():
        captured.append(frame.captured_s)
        if frame.index == 1:
            clock.pass_s(0.25)
    assert captured == pytest.approx([100.0, 100.1, 100.35, 100.35, 100.4])


def test_closing_a_live_clip_ends_its_wait() -> None:
    source = Paced(SyntheticClip(8, 8, count=None, rate=Fraction(1, 3600)))
    frames = source.frames()
    next(frames)
    source.close()
    assert list(frames) == []


def test_a_folder_is_read_in_the_order_of_its_numbers(tmp_path: Path) -> None:
    values = {"f10.png": 30, "f9.png": 20, "f1.PNG": 10}
    for name, value in values.items():
        Image.new("RGB", (5, 4), (value, 0, 0)).save(tmp_path / name)
    Image.fromarray(np.full((3, 7), 65535 // 5, np.uint16)).save(tmp_path / "z.png")
    (tmp_path / "notes.txt").write_text("no picture")
    source = ImageFolder(tmp_path, Fraction(30))
    frames = list(source.frames())
    assert [int(frame.pixels[0, 0, 0]) for frame in frames] == [10, 20, 30, 51]
    assert [tuple(frame.pixels.shape) for frame in frames][2:] == [(4, 5, 3), (3, 7, 3)]
    assert frames[3].time_s == Fraction(1, 10) and (source.height, source.width) == (4, 5)


def test_folders_that_are_none_are_told(tmp_path: Path) -> None:
    with pytest.raises(RedlineError, match=r"^no folder '.*gone'\.$"):
        ImageFolder(tmp_path / "gone")
    with pytest.raises(RedlineError, match=r"holds no pictures \(.*\)\.$"):
        ImageFolder(tmp_path)
    (tmp_path / "a.png").write_bytes(b"\x89PNG broken")
    with pytest.raises(RedlineError, match=r"^the picture 'a\.png' cannot be read\.$"):
        ImageFolder(tmp_path)
    with pytest.raises(RedlineError, match=r"is no folder\.$"):
        ImageFolder(tmp_path / "a.png")

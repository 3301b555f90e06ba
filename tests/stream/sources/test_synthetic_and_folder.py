"""Synthetic clips move as specified, folders are read in natural order, and pacing follows the clock."""

from collections.abc import Generator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from goldens import check_golden
from redline.errors import RedlineError
from redline.stream.frames import Frame
from redline.stream.sources.image_folder import ImageFolder
from redline.stream.sources.synthetic import SyntheticClip
from redline.stream.sources.wrappers import SOURCE_LATE, Paced, check_size
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


def test_a_seed_gives_the_same_pixels_everywhere() -> None:
    pixels = next(SyntheticClip(4, 3, seed=3).frames()).pixels
    check_golden("synthetic_clip.txt", "\n".join(map(str, pixels.tolist())) + "\n")


def test_a_size_at_its_limits_is_taken() -> None:
    check_size(1, 1)
    check_size(16_384, 16_384)
    for size in ((0, 8), (8, 0), (16_385, 8), (8, 16_385)):
        with pytest.raises(RedlineError, match="must have 1 to 16384 pixels"):
            check_size(*size)
    assert SyntheticClip(16_384, 16_384, count=1).height == 16_384


@pytest.mark.parametrize("wrong", [{"height": 0}, {"width": 0}, {"rate": Fraction(0)}, {"count": 0}], ids=str)
def test_a_clip_without_size_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(RedlineError, match=r"must be above 0.*\.$"):
        SyntheticClip(**{"height": 8, "width": 8, **wrong})
    for size in ((16_385, 8), (8, 20_000)):
        with pytest.raises(RedlineError, match=rf"a side has at most 16384 pixels, not {size[1]}×{size[0]}\.$"):
            SyntheticClip(*size)


def test_a_clip_takes_no_memory_before_its_first_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr("redline.stream.sources.synthetic._pattern", lambda *size: made.append(size))
    SyntheticClip(16_000, 16_000, seed=3)
    assert made == []


class SlowClip(SyntheticClip):
    """A clip whose frames take time to compute."""

    def __init__(self, clock: ManualClock, takes_s: float, count: int) -> None:
        super().__init__(8, 8, count=count, rate=Fraction(10))
        self._clock, self._takes_s = clock, takes_s

    def frames(self) -> Generator[Frame, None, None]:
        for frame in super().frames():
            self._clock.pass_s(self._takes_s)
            yield frame


def test_a_live_clip_that_cannot_keep_up_is_late_and_leaves_frames_out() -> None:
    clock, dropped = ManualClock(), []
    source = Paced(SlowClip(clock, 0.3, 20), clock, dropped.append)
    ages = [clock.now_s() - frame.captured_s for frame in source.frames()]
    assert len(ages) + len(dropped) == 20 and set(dropped) == {SOURCE_LATE}
    assert 10 <= len(ages) < 20 and ages[0] == 0 and ages == sorted(ages)
    assert ages[-1] == pytest.approx(19 * 0.2, abs=0.3), "as far behind as it is"


def test_a_live_clip_that_is_late_once_catches_up() -> None:
    clock, dropped = ManualClock(), []
    ages = []
    for frame in Paced(SyntheticClip(8, 8, count=20, rate=Fraction(10)), clock, dropped.append).frames():
        ages.append(clock.now_s() - frame.captured_s)
        if len(ages) == 3:
            clock.pass_s(0.45)
    assert dropped == [SOURCE_LATE] * 2 and ages[3] == pytest.approx(0.15) and ages[-1] == 0


def test_a_live_clip_is_paced_by_the_clock_without_drifting() -> None:
    clock = ManualClock()
    source = Paced(SyntheticClip(8, 8, count=5, rate=Fraction(10)), clock)
    assert source.is_live
    captured = []
    for frame in source.frames():
        captured.append(frame.captured_s)
        if frame.index == 1:
            clock.pass_s(0.25)
    # As from a camera, which does not wait for who looks.
    assert captured == pytest.approx([100.0, 100.1, 100.2, 100.3, 100.4])
    assert clock.now_s() == pytest.approx(100.4)


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


def test_folders_that_are_none_are_reported(tmp_path: Path) -> None:
    with pytest.raises(RedlineError, match=r"gone' does not exist\.$"):
        ImageFolder(tmp_path / "gone")
    with pytest.raises(RedlineError, match=r"has no images \(.*\)\.$"):
        ImageFolder(tmp_path)
    (tmp_path / "a.png").write_bytes(b"\x89PNG broken")
    with pytest.raises(RedlineError, match=r"^cannot read the image .a\.png.\.$"):
        ImageFolder(tmp_path)
    with pytest.raises(RedlineError, match=r"is not a folder\.$"):
        ImageFolder(tmp_path / "a.png")

"""The settings of training clips: the limits of each."""

from dataclasses import replace

import pytest

from redline.datasets.clips import ClipSettings
from redline.errors import RedlineError

PLAIN = ClipSettings("photos", frame_px=8, world_px=8)


@pytest.mark.parametrize("name", ["still", "objects", "cuts"])
def test_a_share_is_from_0_to_1(name: str) -> None:
    assert replace(PLAIN, **{name: 0.0}) and replace(PLAIN, **{name: 1.0})
    for wrong in (-0.01, 1.01):
        with pytest.raises(RedlineError, match=f"{name} must be from 0 to 1"):
            replace(PLAIN, **{name: wrong})


@pytest.mark.parametrize("name", ["dark", "cast"])
def test_darkness_and_cast_leave_something(name: str) -> None:
    assert replace(PLAIN, **{name: 0.99}) and replace(PLAIN, **{name: 0.0})
    with pytest.raises(RedlineError, match="must be below 1"):
        replace(PLAIN, **{name: 1.0})


@pytest.mark.parametrize("name", ["pan_px", "zoom", "turn", "noise", "blur_px"])
def test_motion_and_noise_must_not_be_negative(name: str) -> None:
    assert replace(PLAIN, **{name: 0.0})
    with pytest.raises(RedlineError, match=f"{name} must not be negative"):
        replace(PLAIN, **{name: -0.1})


@pytest.mark.parametrize("wrong", [{"frame_px": 7}, {"world_px": 7}, {"batch": 0}, {"quality": 0}, {"quality": 101}])
def test_sizes_have_limits(wrong: dict[str, int]) -> None:
    assert replace(PLAIN, batch=1, quality=1) and replace(PLAIN, quality=100)
    with pytest.raises(RedlineError):
        replace(PLAIN, **wrong)

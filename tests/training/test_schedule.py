"""The learning rate rises, falls along a cosine and ends where it should, by steps or by the clock."""

import math

import pytest

from redline.training.schedule import Schedule
from redline.training.settings import LoopSettings


def test_by_steps() -> None:
    schedule = Schedule(steps=1000, seconds=None, warmup_steps=10, final_share=0.0)
    rising = [schedule.rate(step, 1e9) for step in range(11)]
    assert rising == sorted(rising) and rising[0] == pytest.approx(1 / 11) and rising[10] == pytest.approx(1, abs=1e-3)
    assert schedule.rate(500, 0) == pytest.approx(0.5)
    assert schedule.rate(250, 0) == pytest.approx((1 + math.cos(math.pi / 4)) / 2)
    assert schedule.rate(1000, 0) == 0
    assert schedule.progress(999, 0) < 1 and schedule.progress(1000, 0) == 1
    assert schedule.left_s(400, 0, steps_per_s=3) == 200


def test_by_the_clock() -> None:
    schedule = Schedule.of(LoopSettings(minutes=2, warmup_steps=0, final_share=0.1))
    assert schedule.rate(10**9, 60) == pytest.approx(0.1 + 0.9 / 2)
    assert schedule.rate(7, 120) == pytest.approx(0.1) and schedule.rate(7, 500) == pytest.approx(0.1)
    assert schedule.progress(10**9, 119.9) < 1 and schedule.progress(0, 120) == 1
    assert schedule.left_s(3, 90, 1.0) == 30


def test_warming_up_goes_by_steps_even_on_the_clock() -> None:
    schedule = Schedule.of(LoopSettings(minutes=2, warmup_steps=9))
    assert schedule.rate(0, 30) == pytest.approx(0.1 * schedule.rate(9, 30))

"""The limits of the training settings, and the schedule of the learning rate."""

import math

import pytest

from redline.errors import RedlineError
from redline.files.config_fields import decode
from redline.training.settings import LoopSettings


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({}, "set either steps or minutes"),
        ({"steps": 5, "minutes": 1}, "set either steps or minutes"),
        ({"steps": 0}, r"steps = 0 .* must be a whole number \(at least 1\)"),
        ({"steps": 5, "learning_rate": 0}, r"learning_rate = 0 .* must be a number \(above 0\)"),
        ({"steps": 5, "warmup_steps": -1}, "warmup_steps = -1 .*at least 0"),
        ({"steps": 5, "ema_decay": 1}, "ema_decay = 1 .*at least 0 and less than 1"),
        ({"steps": 5, "final_share": 7}, "final_share = 7 .*at least 0 and at most 1"),
        ({"steps": 5, "seed": 2**63}, "seed = 9223372036854775808 .* not a finite 64-bit number"),
        ({"steps": 5, "betas": [0.9]}, r"betas = \[0.9\] .* must be a list of 2 items, each a number"),
        ({"steps": 5, "optimizer": "sgd"}, "optimizer = 'sgd' .* must be one of adamw, adam, adamw8bit"),
        ({"steps": 5, "optimizer": "adamv"}, r"optimizer = 'adamv' .*\(did you mean adam"),
        ({"steps": 5, "precision": "fp4"}, "precision = 'fp4' .* must be one of auto, fp32"),
        ({"minutes": float("inf")}, "minutes = inf .* is not a finite 64-bit number"),
    ],
)
def test_impossible_loop_settings_raise(table: dict[str, object], said: str) -> None:
    with pytest.raises(RedlineError, match=said):
        decode(LoopSettings, table, "under [training]")


@pytest.mark.parametrize(
    "change",
    [
        {"weight_decay": 0.0, "warmup_steps": 0, "final_share": 0.0, "checkpoint_minutes": 0.0, "seed": 0},
        {"final_share": 1.0, "seed": 2**63 - 1, "ema_decay": 0.0, "betas": (0.0, 0.999)},
        {"log_every": 1, "validate_every": 1, "keep_checkpoints": 1, "skip_limit": 1},
    ],
    ids=["zeros", "largest", "ones"],
)
def test_settings_at_their_limits_are_valid(change: dict[str, object]) -> None:
    assert decode(LoopSettings, {"steps": 1, **change}, "under [training]")


@pytest.mark.parametrize(
    "change",
    [
        *[{name: -1} for name in ("weight_decay", "final_share", "checkpoint_minutes", "seed", "ema_decay")],
        *[{name: 0} for name in ("clip_norm", "log_every", "validate_every", "keep_checkpoints", "skip_limit")],
        {"betas": (0.9, 1.0)},
        {"betas": (-0.1, 0.9)},
        {"precision": "int8"},
    ],
    ids=str,
)
def test_settings_beyond_their_limits_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(RedlineError, match=next(iter(change))):
        decode(LoopSettings, {"steps": 1, **change}, "under [training]")


def test_the_rate_falls_by_steps() -> None:
    schedule = LoopSettings(steps=1000, warmup_steps=10, final_share=0.0)
    rising = [schedule.rate_factor(step, 1e9) for step in range(11)]
    assert rising == sorted(rising) and rising[0] == pytest.approx(1 / 11) and rising[10] == pytest.approx(1, abs=1e-3)
    assert schedule.rate_factor(500, 0) == pytest.approx(0.5)
    assert schedule.rate_factor(250, 0) == pytest.approx((1 + math.cos(math.pi / 4)) / 2)
    assert schedule.rate_factor(1000, 0) == 0
    assert schedule.progress(999, 0) < 1 and schedule.progress(1000, 0) == 1
    assert schedule.left_s(400, 0, steps_per_s=3) == 200


def test_the_rate_falls_by_the_clock() -> None:
    schedule = LoopSettings(minutes=2, warmup_steps=0, final_share=0.1)
    assert schedule.rate_factor(10**9, 60) == pytest.approx(0.1 + 0.9 / 2)
    assert schedule.rate_factor(7, 120) == pytest.approx(0.1) and schedule.rate_factor(7, 500) == pytest.approx(0.1)
    assert schedule.progress(10**9, 119.9) < 1 and schedule.progress(0, 120) == 1
    assert schedule.left_s(3, 90, 1.0) == 30


def test_warming_up_goes_by_steps_even_on_the_clock() -> None:
    schedule = LoopSettings(minutes=2, warmup_steps=9)
    assert schedule.rate_factor(0, 30) == pytest.approx(0.1 * schedule.rate_factor(9, 30))

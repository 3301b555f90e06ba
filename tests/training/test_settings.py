"""Settings are read strictly: what is not known, not of its kind or impossible is said by name."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from redline.errors import RedlineError
from redline.files.untrusted import read_toml
from redline.training.settings import LoopSettings, fill, sections


@dataclass(frozen=True)
class Example:
    count: int = 1
    share: float = 0.5
    name: str = ""
    sure: bool = False
    sizes: tuple[int, ...] = (1,)
    limit: int | None = None


def test_every_kind_is_read() -> None:
    table = {"count": 3, "share": 2, "name": "x", "sure": True, "sizes": [4, 5], "limit": 7}
    assert fill(Example, table, "example") == Example(3, 2.0, "x", True, (4, 5), 7)
    assert fill(Example, {"sizes": 2}, "example").sizes == (2,)
    assert fill(Example, {}, "example") == Example()


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"cuont": 3}, r"'cuont' under \[example\] \(did you mean count"),
        ({"zebra": 3}, "there are count, share"),
        ({"count": 2.5}, "not a whole number"),
        ({"count": True}, "not a whole number"),
        ({"share": "half"}, "not a number"),
        ({"sure": 1}, "not true or false"),
        ({"sizes": [1, "two"]}, "'two' is not a whole number"),
        ({"share": float("nan")}, "share = nan is not a finite number"),
        ({"share": float("inf")}, "share = inf is not a finite number"),
    ],
)
def test_what_is_wrong_is_said(table: dict[str, object], said: str) -> None:
    with pytest.raises(RedlineError, match=said):
        fill(Example, table, "example")


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({}, "either steps or minutes"),
        ({"steps": 5, "minutes": 1}, "either steps or minutes"),
        ({"steps": 0}, "steps must be above zero"),
        ({"steps": 5, "learning_rate": 0}, "learning_rate must be above zero"),
        ({"steps": 5, "warmup_steps": -1}, "warmup_steps must not be negative"),
        ({"steps": 5, "ema_decay": 1}, "ema_decay"),
        ({"steps": 5, "final_share": 7}, "final_share is a share"),
        ({"steps": 5, "seed": 2**63}, "seed must be less than"),
        ({"steps": 5, "betas": [0.9]}, "betas"),
        ({"steps": 5, "optimizer": "sgd"}, "unknown optimizer 'sgd'"),
        ({"steps": 5, "precision": "fp16"}, "unknown precision 'fp16'"),
    ],
)
def test_impossible_trainings_are_refused(table: dict[str, object], said: str) -> None:
    with pytest.raises(RedlineError, match=said):
        fill(LoopSettings, table, "training")


def test_files_and_sections(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text("[model]\nwidth = 3\n")
    assert sections(read_toml(path, "settings file"), ("model", "data")) == [{"width": 3}, {}]
    with pytest.raises(RedlineError, match=r"unknown section \[model\] in the settings \(did you mean models"):
        sections(read_toml(path, "settings file"), ("models",))
    path.write_text("model = 3\n")
    with pytest.raises(RedlineError, match=r"write \[model\]"):
        sections(read_toml(path, "settings file"), ("model",))
    path.write_text("[model\n")
    with pytest.raises(RedlineError, match="not TOML"):
        read_toml(path, "settings file")
    with pytest.raises(RedlineError, match="cannot read"):
        read_toml(tmp_path / "none.toml", "settings file")


@pytest.mark.parametrize(
    "change",
    [
        {"weight_decay": 0.0, "warmup_steps": 0, "final_share": 0.0, "checkpoint_minutes": 0.0, "seed": 0},
        {"final_share": 1.0, "seed": 2**63 - 1, "ema_decay": 0.0, "betas": (0.0, 0.999)},
        {"log_every": 1, "validate_every": 1, "keep_checkpoints": 1, "skip_limit": 1},
    ],
    ids=["zeros", "largest", "ones"],
)
def test_settings_at_their_limits_are_taken(change: dict[str, object]) -> None:
    assert LoopSettings(steps=1, **change)


@pytest.mark.parametrize(
    "change",
    [
        *[{name: -1} for name in ("weight_decay", "final_share", "checkpoint_minutes", "seed", "ema_decay")],
        *[{name: 0} for name in ("clip_norm", "log_every", "validate_every", "keep_checkpoints", "skip_limit")],
        {"betas": (0.9, 1.0)},
        {"betas": (-0.1, 0.9)},
        {"precision": "fp16"},
    ],
    ids=str,
)
def test_settings_beyond_their_limits_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(RedlineError, match=next(iter(change))):
        LoopSettings(steps=1, **change)


def test_a_training_ends() -> None:
    assert LoopSettings(minutes=0.1)
    with pytest.raises(RedlineError, match="never end"):
        LoopSettings(minutes=float("inf"))

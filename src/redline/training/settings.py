"""A training's settings, read from TOML: a word that is not known or not of its kind is an error, never ignored."""

import difflib
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeVar

from redline.errors import RedlineError
from redline.files.untrusted import shorten

T = TypeVar("T")


@dataclass(frozen=True)
class LoopSettings:
    """How long, how fast and how carefully to learn; the same for every kind of model.

    With `minutes`, the schedule follows the clock and ends in time; with `steps`, it follows the steps. Both together
    are refused, and so is neither. A step whose loss or gradient is not finite is skipped; `skip_limit` of them in a
    row end the training.
    """

    optimizers: ClassVar[tuple[str, ...]] = ("adamw", "adam")
    precisions: ClassVar[tuple[str, ...]] = ("bf16", "fp32")

    steps: int | None = None
    minutes: float | None = None
    optimizer: str = "adamw"
    learning_rate: float = 5e-4
    betas: tuple[float, ...] = (0.9, 0.99)
    weight_decay: float = 0.0
    warmup_steps: int = 200
    final_share: float = 0.01
    clip_norm: float = 1.0
    ema_decay: float = 0.999
    precision: str = "bf16"
    seed: int = 0
    log_every: int = 50
    validate_every: int = 2000
    checkpoint_minutes: float = 2.0
    keep_checkpoints: int = 2
    skip_limit: int = 10

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.minutes is None):
            raise RedlineError("a training takes either steps or minutes: write one of them under [training].")
        positive = ("steps", "minutes", "learning_rate", "clip_norm", "log_every", "validate_every")
        for name in (*positive, "keep_checkpoints", "skip_limit"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise RedlineError(f"{name} must be above zero, not {value}.")
        for name in ("weight_decay", "warmup_steps", "final_share", "checkpoint_minutes", "seed"):
            if getattr(self, name) < 0:
                raise RedlineError(f"{name} must not be negative, as {getattr(self, name)} is.")
        if self.minutes is not None and not math.isfinite(self.minutes):
            raise RedlineError(f"minutes = {self.minutes} never end.")
        if self.final_share > 1:
            raise RedlineError(f"final_share is a share of the learning rate, at most 1, not {self.final_share}.")
        if self.seed >= 2**63:
            raise RedlineError(f"seed must be less than 2^63, not {self.seed}.")
        if not 0 <= self.ema_decay < 1:
            raise RedlineError(f"ema_decay must be 0 or more and less than 1, not {self.ema_decay}.")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise RedlineError(f"betas are two numbers from 0 to less than 1, not {self.betas}.")
        choices("optimizer", self.optimizer, self.optimizers)
        choices("precision", self.precision, self.precisions)


def choices(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise RedlineError(f"unknown {name} {value!r}: it is one of {', '.join(known)}.")


def sections(table: Mapping[str, Any], known: tuple[str, ...]) -> list[dict[str, Any]]:
    """The named tables of a file, each once; others are refused."""
    for name, value in table.items():
        if name not in known:
            raise RedlineError(f"unknown section [{name}] in the settings{_near(name, known)}.")
        if not isinstance(value, dict):
            raise RedlineError(f"{name} is a section of the settings: write [{name}].")
    return [dict(table.get(name, {})) for name in known]


def fill(kind: type[T], table: Mapping[str, Any], section: str) -> T:
    """A dataclass from a table of the file."""
    known = tuple(field.name for field in fields(typing.cast(Any, kind)))
    hints = typing.get_type_hints(kind)
    values = {}
    for name, value in table.items():
        if name not in known:
            raise RedlineError(f"unknown setting {name!r} under [{section}]{_near(name, known)}.")
        values[name] = _as(hints[name], value, name)
    try:
        return kind(**values)
    except TypeError as error:
        raise RedlineError(f"[{section}] is not whole: {error}.") from error


def _as(hint: Any, value: Any, name: str) -> Any:
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        kinds = [part for part in typing.get_args(hint) if part is not type(None)]
        hint = next((part for part in kinds if type(value) is part), kinds[0])
    if typing.get_origin(hint) is tuple:
        items = value if isinstance(value, (list, tuple)) else [value]
        return tuple(_as(typing.get_args(hint)[0], item, name) for item in items)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value) if abs(value) < 1e300 else math.inf
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise RedlineError(f"{name} = {shorten(value)} is not {_KINDS[hint]}.")
    if isinstance(value, int) and abs(value) >= 1 << 64:
        raise RedlineError(f"{name} = {shorten(value)} has too many digits.")
    if isinstance(value, float) and not math.isfinite(value):
        raise RedlineError(f"{name} = {value!r} is not a finite number.")
    return value


_KINDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


def _near(name: str, known: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(name, known, 1)
    return f" (did you mean {close[0]}?)" if close else f" (there are {', '.join(known)})"

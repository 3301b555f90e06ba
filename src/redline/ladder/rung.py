"""A rung: one optimization. Its fields are its options; its methods check whether it applies, apply it and prove it."""

import operator
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from enum import IntEnum
from typing import Any, ClassVar

from redline.errors import RungError
from redline.ladder.job import Job
from redline.machine.machine import Machine


@dataclass(frozen=True)
class ShapeCounts:
    """How often a rung set up for new input shapes, how often it fell back to slower code, and why it fell back."""

    set_ups: int = 0
    fallbacks: int = 0
    reason: str = ""


class Stage(IntEnum):
    """The position of a rung in a plan; a later stage builds on the earlier ones."""

    STRUCTURE = 1
    MEMORY = 2
    PRECISION = 3
    LAYOUT = 4
    FLAGS = 5
    COMPILE = 6
    LAUNCH = 7


_LIMITS = {"at_least": operator.ge, "above": operator.gt, "at_most": operator.le, "below": operator.lt}


def option(default: Any, help: str, choices: Sequence[Any] = (), **limits: float) -> Any:
    """Declares an option of a rung: its default, a line of help, and the allowed values.

    A number may have the limits `at_least`, `above`, `at_most` and `below`.
    """
    return field(default=default, metadata={"help": help, "choices": tuple(choices), "limits": limits})


@dataclass(frozen=True)
class Rung(ABC):
    """Base class: each rung is a frozen dataclass in a file of its own name, listed in `redline.ladder.rungs.RUNGS`."""

    name: ClassVar[str]
    stage: ClassVar[Stage]
    summary: ClassVar[str]  # one line for `redline rungs`
    inference: ClassVar[bool] = True
    training: ClassVar[bool] = True
    excludes: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        for item in fields(self):
            choices = item.metadata.get("choices", ())
            value = getattr(self, item.name)
            if choices and value not in choices:
                allowed = ", ".join(map(str, choices))
                raise RungError(f"{self.name}: unknown {item.name} {value!r} (supported: {allowed}).")
            for word, limit in item.metadata.get("limits", {}).items():
                if not _LIMITS[word](value, limit):
                    raise RungError(
                        f"{self.name}: {item.name} must be {word.replace('_', ' ')} {limit:g}, not {value}."
                    )

    @classmethod
    def options(cls) -> tuple[Field[Any], ...]:
        return fields(cls)

    @classmethod
    def variants(cls, machine: Machine, training: bool = False) -> "tuple[Rung, ...]":
        """Returns the configurations that a climb tries; by default only the one with default options."""
        return (cls(),)

    def adjust_other(self, other: "Rung") -> "Rung | None":
        """Called when this rung is added to a plan with `other`: returns what replaces `other`; None removes it."""
        return other

    def fallbacks(self, verdict: str, training: bool) -> "tuple[tuple[Rung, ...], ...]":
        """Returns the groups of rungs that a climb tries instead if this rung was refused, failed or timed out."""
        return ()

    @property
    def autotunes(self) -> bool:
        """Whether kernels are timed while the rung is set up, so that nothing else may run on the device meanwhile."""
        return False

    @property
    def freezes_state(self) -> bool:
        """Whether the rung exports the model, so that state which the model keeps between calls is lost."""
        return False

    @property
    def checks_gates(self) -> bool:
        """Whether the rung evaluates the gates, so that it needs the untouched model's outputs (`job.expected`)."""
        return False

    def why_not(self, machine: Machine, job: Job | None = None) -> str:
        """Returns why the rung cannot be applied; empty if it can. Without a job, checks only the machine."""
        return ""

    def resolve(self, job: Job) -> "Rung":
        """Returns the rung with its automatic choices resolved, so that the saved plan replays exactly."""
        return self

    @abstractmethod
    def apply(self, job: Job) -> Job:
        """Returns the new job. May change `job.model`, but not the user's model or global flags."""

    @abstractmethod
    def proof(self, job: Job) -> str:
        """Returns what the rung did, checked after the first calls; empty if nothing (the plan is then refused)."""

    def why_no_proof(self, job: Job) -> str:
        """Returns why `proof` is empty, if the rung can tell."""
        return ""

    def shape_counts(self, job: Job) -> ShapeCounts:
        """Returns how often the rung has set up (compiled, captured, built an engine) for inputs of a new shape."""
        return ShapeCounts()

    def __str__(self) -> str:
        parts = []
        for item in fields(self):
            value = getattr(self, item.name)
            default = item.default if item.default is not MISSING else None
            if value != default:
                parts.append(f"{item.name}={_format(value)}")
        return f"{self.name}({', '.join(parts)})" if parts else self.name


def _format(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "[" + " ".join(map(str, value)) + "]"
    return str(value)

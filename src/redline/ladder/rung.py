"""A rung: one optimization. Its fields are its options; its methods check, apply and prove it."""

import operator
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from enum import IntEnum
from typing import Any, ClassVar

from redline.errors import RungError
from redline.ladder.job import Job
from redline.machine.machine import Machine


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
    """Subclass as a frozen dataclass in a file of the rung's own name, and add it to `redline.ladder.rungs.RUNGS`."""

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
        """Returns the configurations that a climb tries; by default the one with the default options."""
        return (cls(),)

    def adjust_other(self, other: "Rung") -> "Rung | None":
        """Returns how `other`, which is in the plan, must change if this rung is added; None to remove it."""
        return other

    def fallbacks(self, verdict: str, training: bool) -> "tuple[tuple[Rung, ...], ...]":
        """Returns the groups of rungs that a climb tries instead if this rung was refused, failed or timed out."""
        return ()

    @property
    def autotunes(self) -> bool:
        """Whether its set-up times kernels, so nothing else may run on the device meanwhile."""
        return False

    @property
    def freezes_state(self) -> bool:
        """Whether it exports the model once, so that state that the model keeps between calls is lost."""
        return False

    @property
    def checks_gates(self) -> bool:
        """Whether it evaluates the gates, so it needs the untouched model's outputs (`job.expected`)."""
        return False

    def why_not(self, machine: Machine, job: Job | None = None) -> str:
        """Returns the reason why it cannot apply, or "". Without a job, checks the machine alone."""
        return ""

    def resolve(self, job: Job) -> "Rung":
        """Returns the rung with its automatic choices resolved, so that the saved plan replays exactly."""
        return self

    @abstractmethod
    def apply(self, job: Job) -> Job:
        """Returns the new job. May change `job.model`, but not the user's model or global flags."""

    @abstractmethod
    def proof(self, job: Job) -> str:
        """Returns what the rung did, checked after the first calls; "" means nothing, and the rung is refused."""

    def why_no_proof(self, job: Job) -> str:
        """Returns why `proof` is empty, if the rung knows."""
        return ""

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

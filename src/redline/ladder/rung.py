"""A rung: one optimization. Its fields are its options, and it can say why not, do it, and prove it."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from enum import IntEnum
from typing import Any, ClassVar

from redline.errors import RungError
from redline.ladder.job import Job
from redline.machine.machine import Machine


class Stage(IntEnum):
    """Where a rung belongs in the order; a later stage builds on the earlier ones."""

    STRUCTURE = 1
    MEMORY = 2
    PRECISION = 3
    LAYOUT = 4
    FLAGS = 5
    COMPILE = 6
    LAUNCH = 7


def option(default: Any, help: str, choices: Sequence[Any] = ()) -> Any:
    """A rung's option: its default, a line of help, and the values it may take."""
    return field(default=default, metadata={"help": help, "choices": tuple(choices)})


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
                raise RungError(f"{self.name}: {item.name} is one of {allowed}, not {value!r}.")

    @classmethod
    def options(cls) -> tuple[Field[Any], ...]:
        return fields(cls)

    @classmethod
    def variants(cls, machine: Machine, training: bool = False) -> "tuple[Rung, ...]":
        """What a climb tries; by default the rung with its default options."""
        return (cls(),)

    def beside(self, other: "Rung") -> "Rung | None":
        """The other rung as it must be when this one joins the plan; None when it has to leave."""
        return other

    def instead(self, verdict: str, training: bool) -> "tuple[tuple[Rung, ...], ...]":
        """What a climb tries next when this was `refused`, `failed` or ran out of time: rungs to add together."""
        return ()

    @property
    def searches(self) -> bool:
        """Whether setting it up times something on the device, and so must have the device to itself."""
        return False

    @property
    def judges(self) -> bool:
        """Whether it decides by the gates, and so needs what the model gave before any rung (`job.expected`)."""
        return False

    def why_not(self, machine: Machine, job: Job | None = None) -> str:
        """A sentence when it cannot apply; empty when it can. Without a job, asks about the machine alone."""
        return ""

    def resolve(self, job: Job) -> "Rung":
        """The same rung with every automatic choice made, so that the plan that is saved replays exactly."""
        return self

    @abstractmethod
    def apply(self, job: Job) -> Job:
        """The next job. `job.model` may be changed; the user's model and global flags may not."""

    @abstractmethod
    def proof(self, job: Job) -> str:
        """What really happened, asked after the first calls; empty means nothing did, and the rung is refused."""

    def why_nothing(self, job: Job) -> str:
        """Why there is no proof, where the rung knows."""
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

"""Rungs with known effects, planted into the registry of this process and, as a workload file, of every worker."""

import itertools
import os
import random
import signal
import threading
import time
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from redline import Rung, Stage, Workload
from redline.ladder.job import Job
from redline.ladder.measuring import worker
from redline.ladder.rung import ShapeCounts, option
from redline.ladder.rungs import RUNGS


class PlantedClock:
    """Time that passes only when the model says so: what a rung is worth is known to a hair, under any load."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.hair = random.Random(0)
        self.lock = threading.Lock()  # concurrent callers wait at the same time

    def perf_counter(self) -> float:
        with self.lock:
            self.now_s += 1e-6  # no step takes no time
            return self.now_s

    def __deepcopy__(self, _: object) -> "PlantedClock":
        return self  # a copy of the model lives in the same time

    @torch.compiler.disable
    def sleep(self, seconds: float) -> None:
        with self.lock:
            self.now_s += seconds * self.hair.uniform(0.999, 1.001)


class Waits(nn.Module):
    """Waits for a set time, so that what a rung is worth is known."""

    def __init__(self, clock: Any = time) -> None:
        super().__init__()
        self.clock = clock
        self.seconds = 0.008
        self.scale = 1.0
        self.layer = nn.Linear(6, 5)
        # 64 MiB in pieces, because an allocator may hold on to the last piece that is freed.
        self.ballast = [torch.ones(2**20) for _ in range(16)]

    def forward(self, x: Tensor) -> Tensor:
        # Other load does not stretch a sleep as it does a busy loop. A compiler makes it half as long.
        if next(getattr(self, "spikes", None) or iter([1])) % 20 == 0:
            self.clock.sleep(7 * self.seconds)
        self.clock.sleep(self.seconds / 2 if torch.compiler.is_compiling() else self.seconds)
        return self.layer(x) * self.scale


def waits() -> Workload:
    return Workload(Waits, lambda seed: torch.randn(3, 6))


def ticks(batch: int = 3) -> Workload:
    """The same in planted time: for tests of what follows from a measurement, not of the measuring."""
    clock: Any = PlantedClock()
    if __name__.startswith("redline_workload_"):
        # All shapes of a workload share one clock, like the model; this file is loaded again for each of them.
        clock = worker.time if hasattr(worker.time, "hair") else clock
        worker.time = clock
    return Workload(lambda: Waits(clock), lambda seed: torch.randn(batch, 6))


@dataclass(frozen=True)
class Planted(Rung):
    stage: ClassVar[Stage] = Stage.STRUCTURE
    summary: ClassVar[str] = "planted"

    def proof(self, job: Job) -> str:
        return "it happened"


@dataclass(frozen=True)
class PlantedFast(Planted):
    name: ClassVar[str] = "planted_fast"

    def apply(self, job: Job) -> Job:
        job.model.seconds /= 2
        return job


@dataclass(frozen=True)
class PlantedUseless(Planted):
    name: ClassVar[str] = "planted_useless"

    def apply(self, job: Job) -> Job:
        return job


@dataclass(frozen=True)
class PlantedSlow(Planted):
    name: ClassVar[str] = "planted_slow"

    def apply(self, job: Job) -> Job:
        job.model.seconds *= 1.1
        return job


@dataclass(frozen=True)
class PlantedSmall(Planted):
    """As fast, and without the ballast that the model carries."""

    name: ClassVar[str] = "planted_small"

    def apply(self, job: Job) -> Job:
        job.model.ballast.clear()
        return job


@dataclass(frozen=True)
class PlantedWrong(Planted):
    """Fast and wrong: 10% off."""

    name: ClassVar[str] = "planted_wrong"

    def apply(self, job: Job) -> Job:
        job.model.seconds = 0.0
        job.model.scale = 1.1
        return job


@dataclass(frozen=True)
class PlantedNan(Planted):
    name: ClassVar[str] = "planted_nan"

    def apply(self, job: Job) -> Job:
        job.model.seconds, job.model.scale = 0.0, float("nan")
        return job


@dataclass(frozen=True)
class PlantedEmpty(Planted):
    """Claims a gain, and can show nothing for it."""

    name: ClassVar[str] = "planted_empty"

    def apply(self, job: Job) -> Job:
        job.model.seconds = 0.0
        return job

    def proof(self, job: Job) -> str:
        return ""


@dataclass(frozen=True)
class PlantedCrash(Planted):
    name: ClassVar[str] = "planted_crash"

    def apply(self, job: Job) -> Job:
        os.kill(os.getpid(), signal.SIGKILL)
        return job


@dataclass(frozen=True)
class PlantedHang(Planted):
    name: ClassVar[str] = "planted_hang"

    def apply(self, job: Job) -> Job:
        time.sleep(600)
        return job


@dataclass(frozen=True)
class PlantedSearch(PlantedHang):
    """Never comes to an end, as a search over kernels does."""

    name: ClassVar[str] = "planted_search"
    mode: str = option("default", "what is planted", choices=("default", "max-autotune"))
    wide: bool = option(False, "what is planted")


@dataclass(frozen=True)
class PlantedRaises(Planted):
    name: ClassVar[str] = "planted_raises"

    def apply(self, job: Job) -> Job:
        raise ValueError("this rung is broken")


@dataclass(frozen=True)
class PlantedFixed(Planted):
    """Sets the time outright, so that `planted_fast` before it is worth nothing any more."""

    name: ClassVar[str] = "planted_fixed"
    stage: ClassVar[Stage] = Stage.LAUNCH

    def apply(self, job: Job) -> Job:
        job.model.seconds = 0.002
        return replace(job)


@dataclass(frozen=True)
class PlantedCareful(Planted):
    """Worth nothing alone; mends what `planted_hasty` breaks."""

    name: ClassVar[str] = "planted_careful"
    stage: ClassVar[Stage] = Stage.LAUNCH

    def apply(self, job: Job) -> Job:
        job.model.scale = 1.0
        return job


@dataclass(frozen=True)
class PlantedHasty(PlantedWrong):
    """Fast and wrong, but it knows a way out."""

    name: ClassVar[str] = "planted_hasty"

    def fallbacks(self, verdict: str, training: bool) -> tuple[tuple[Rung, ...], ...]:
        return ((self, PlantedCareful()),) if verdict == "refused" else ()


@dataclass(frozen=True)
class PlantedLater(Planted):
    """Worth nothing until `planted_engine` has taken its own time away, as half precision where launches dominate."""

    name: ClassVar[str] = "planted_later"

    def apply(self, job: Job) -> Job:
        job.model.quick = True
        return job


@dataclass(frozen=True)
class PlantedEngine(Planted):
    name: ClassVar[str] = "planted_engine"
    stage: ClassVar[Stage] = Stage.COMPILE

    def apply(self, job: Job) -> Job:
        job.model.seconds = 0.001 if getattr(job.model, "quick", False) else 0.004
        return job


@dataclass(frozen=True)
class PlantedSpiky(Planted):
    """Twice as fast, but one call in twenty takes eight times as long."""

    name: ClassVar[str] = "planted_spiky"

    def apply(self, job: Job) -> Job:
        job.model.seconds /= 2
        job.model.spikes = itertools.count()
        return job


@dataclass(frozen=True)
class PlantedSizes(Planted):
    """Twice as fast; sets up for each of the first four sizes, falls back at the others, and fails at seven."""

    name: ClassVar[str] = "planted_sizes"

    def apply(self, job: Job) -> Job:
        job.model.seconds /= 2
        sizes: set[int] = set()
        counts = [0, 0]

        def count(_: nn.Module, inputs: tuple[Tensor]) -> None:
            (x,) = inputs
            if len(x) == 7:
                raise ValueError("seven is unlucky")
            if len(x) not in sizes and len(sizes) < 4:
                sizes.add(len(x))
                counts[0] += 1
            elif len(x) not in sizes:
                counts[1] += 1

        job.model.register_forward_pre_hook(count)
        return job.with_evidence(self.name, counts)

    def shape_counts(self, job: Job) -> ShapeCounts:
        return ShapeCounts(*job.evidence[self.name], "there are four")


PLANTED = (
    PlantedFast,
    PlantedUseless,
    PlantedSlow,
    PlantedSmall,
    PlantedWrong,
    PlantedNan,
    PlantedEmpty,
    PlantedCrash,
    PlantedHang,
    PlantedRaises,
    PlantedFixed,
)


RESCUED = (PlantedHasty, PlantedCareful)
LATE = (PlantedLater, PlantedEngine)
UNEVEN = (PlantedSpiky,)
SIZED = (PlantedSizes,)
ENDLESS = (PlantedSearch,)


def plant() -> None:
    RUNGS.update({rung.name: rung for rung in (*PLANTED, *RESCUED, *LATE, *UNEVEN, *SIZED, *ENDLESS)})


def uproot() -> None:
    for rung in (*PLANTED, *RESCUED, *LATE, *UNEVEN, *SIZED, *ENDLESS):
        RUNGS.pop(rung.name, None)


if __name__.startswith("redline_workload_"):
    plant()  # a worker imports this file as its workload

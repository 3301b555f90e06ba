"""Examines a machine: its dtypes and kernels, its measured ceilings, and the rungs that can run on it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from redline.ladder.measuring.worker_pool import WorkerPool
from redline.ladder.rung import Rung
from redline.ladder.rungs import RUNGS
from redline.ladder.search.preparation import ask_machine
from redline.machine.gpu_classes import why_unmeasured
from redline.machine.machine import Machine


@dataclass(frozen=True)
class Diagnosis:
    """The result of `doctor`. `why_not` gives, for each rung, why it cannot run on this machine; "" if it can."""

    machine: Machine
    precision: str
    precision_reason: str
    why_not: Mapping[str, str]

    def as_dict(self) -> dict[str, Any]:
        return {
            **self.machine.as_dict(),
            "unmeasured": why_unmeasured(self.machine.capability) if self.machine.is_cuda else "",
            "recommended_precision": {"precision": self.precision, "why": self.precision_reason},
            "rungs": {name: {"available": not why, "why_not": why} for name, why in self.why_not.items()},
        }


def doctor(
    device: str = "auto", *, again: bool = False, progress: Callable[[str], None] = lambda text: None
) -> Diagnosis:
    """Returns what a device supports, its measured ceilings, and which rungs can run on it.

    Args:
        device: `"cpu"`, `"cuda"`, `"cuda:1"`; `"auto"` uses a GPU if there is one.
        again: Whether to measure the ceilings again. By default they are measured once per machine, and cached.
        progress: Called with a text when a step begins. Measuring the ceilings takes a few seconds.

    >>> diagnosis = redline.doctor("cpu")
    >>> diagnosis.machine.device, diagnosis.precision in ("fp32", "bf16", "fp16")
    ('cpu', True)
    >>> diagnosis.why_not["fold_batchnorm"], diagnosis.why_not["cuda_graph"] != ""
    ('', True)
    """
    progress("measuring the ceilings (a few seconds, once per machine)")
    with WorkerPool() as pool:
        machine = ask_machine(pool, device, again=again)
    precision, reason = machine.recommended_precision()
    return Diagnosis(machine, precision, reason, {name: _why_not(rung, machine) for name, rung in RUNGS.items()})


def _why_not(rung: type[Rung], machine: Machine) -> str:
    """Returns why the first variant of the rung cannot run; "" if any variant can run."""
    variants = rung.variants(machine) or (rung(),)
    reasons = [variant.why_not(machine) for variant in variants]
    return "" if "" in reasons else reasons[0]

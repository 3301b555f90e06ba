"""Chooses the plan of an application: the given plan, or the bundled plan for this kind of machine."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

from torch import nn

from redline.errors import RedlineError
from redline.ladder.job import Job
from redline.ladder.plan import Plan, parse_rung
from redline.machine.gpu_classes import gpu_class, why_unmeasured
from redline.machine.machine import Machine

_PRECISION_RUNGS = ("bf16", "fp16", "autocast", "int8", "fp8", "tf32")
_FOLDER = Path(str(resources.files("redline.ladder.plans")))
# For each application, the rung that sets each precision; "" if the weights are loaded in that precision already.
_PRECISIONS: Mapping[str, Mapping[str, str]] = {
    "generate": {"fp32": "", "bf16": "", "fp16": "", "int8": "int8", "fp8": "fp8(mode=weight_only)"},
    "stream": {"fp32": "", "tf32": "tf32", "bf16": "bf16", "fp16": "fp16"},
    "train": {},
    "upscale": {"fp32": "", "bf16": "bf16", "fp16": "fp16", "int8": "int8(mode=dynamic)"},
}


@dataclass(frozen=True)
class ChosenPlan:
    """A plan; `left_out` has the rungs of the bundled plan that cannot run here, with the reason for each.

    `unmeasured` is a warning if the bundled plan was not measured on this class of GPU, else empty.
    """

    plan: Plan
    left_out: Mapping[str, str] = field(default_factory=dict)
    unmeasured: str = ""

    def __str__(self) -> str:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in self.left_out.items())
        remarks = [text for text in (f"without {reasons}" if reasons else "", self.unmeasured) if text]
        return f"{self.plan} ({'; '.join(remarks)})" if remarks else str(self.plan)


def choose_plan(
    application: str,
    machine: Machine,
    precision: str = "auto",
    given: Plan | None = None,
    model: nn.Module | None = None,
) -> ChosenPlan:
    """Returns the given plan, or the bundled plan for this machine with the rung for `precision`.

    Leaves out bundled rungs that cannot run on this machine, or on `model` if it is given. Raises RedlineError if the
    precision is unknown or cannot run here, or if both a plan and a precision are given.
    """
    precisions = _PRECISIONS[application]
    if precision != "auto" and precision not in precisions:
        raise RedlineError(f"unknown precision {precision!r} (supported: auto, {', '.join(precisions)}).")
    if given is not None:
        if precision != "auto":
            raise RedlineError("the plan sets the precision: leave out --precision, or --plan.")
        return ChosenPlan(given)
    job = None if model is None else Job(model)
    shipped = Plan.load(bundled(application, machine)).rungs
    replaced = _PRECISION_RUNGS if precision != "auto" else ()
    reasons = {rung.name: rung.why_not(machine) or rung.why_not(machine, job) for rung in shipped}
    left_out = {name: reason for name, reason in reasons.items() if reason and name not in replaced}
    plan = Plan(tuple(rung for rung in shipped if rung.name not in left_out and rung.name not in replaced))
    if text := precisions.get(precision):
        rung = parse_rung(text)
        if reason := rung.why_not(machine):
            raise RedlineError(f"precision {precision} cannot run here: {reason}.")
        if text == "int8(mode=dynamic)" and machine.is_cuda and "fused_ops" in plan:
            # On a GPU, int8 does not support layers whose weights fused_ops has reordered (pack=true).
            plan = plan.with_rung(parse_rung("fused_ops(pack=false)"))
        plan = plan.with_rung(rung)
    return ChosenPlan(plan, left_out, why_unmeasured(machine.capability) if machine.is_cuda else "")


def bundled(application: str, machine: Machine, folder: Path = _FOLDER) -> Path:
    """Returns the bundled plan file for a CPU or a GPU.

    For a GPU this is the file for its class, such as `upscale-sm89.toml`, or `upscale-cuda.toml` if there is none.
    """
    if not machine.is_cuda:
        return folder / f"{application}-cpu.toml"
    own = folder / f"{application}-{gpu_class(machine.capability).name}.toml"
    return own if own.exists() else folder / f"{application}-cuda.toml"

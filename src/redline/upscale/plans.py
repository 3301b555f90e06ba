"""Which plan the network runs under: the one that was given, or the one shipped for this kind of machine."""

from pathlib import Path

from torch import nn

from redline.errors import RedlineError
from redline.ladder.job import Job
from redline.ladder.plan import Plan, parse_rung
from redline.ladder.plans import shipped_plan
from redline.machine.machine import Machine

_PRECISION_RUNGS = ("fp16", "bf16", "int8", "fp8", "autocast")


def choose_plan(machine: Machine, model: nn.Module, precision: str = "auto", given: Path | None = None) -> Plan:
    """A precision asked for by name that cannot run here is refused; `auto` takes what the machine is good at."""
    if given is not None:
        return Plan.load(given)
    # Shipped for DRCT: another network may have nothing that a rung could work on.
    shipped = shipped_plan("upscale", machine).rungs
    plan = Plan.of([rung for rung in shipped if not rung.why_not(machine, Job(model))])
    if precision == "auto":
        return plan
    for name in _PRECISION_RUNGS:
        plan = plan.without(name)
    if precision == "fp32":
        return plan
    rung = parse_rung("int8(mode=dynamic)" if precision == "int8" else precision)
    if reason := rung.why_not(machine):
        raise RedlineError(f"{precision} cannot run here: {reason}.")
    if precision == "int8" and machine.is_cuda and "fused_ops" in plan:
        plan = plan.with_rung(parse_rung("fused_ops(pack=false)"))  # a GPU's packed layers are none that it knows
    return plan.with_rung(rung)

"""Chooses the plan of the network: the given one, or the one shipped for this kind of machine."""

from torch import nn

from redline.errors import RedlineError
from redline.ladder.job import Job
from redline.ladder.plan import Plan, parse_rung
from redline.ladder.plans import shipped_plan
from redline.machine.machine import Machine

_PRECISION_RUNGS = ("fp16", "bf16", "int8", "fp8", "autocast")


def choose_plan(machine: Machine, model: nn.Module, precision: str = "auto", given: Plan | None = None) -> Plan:
    """Returns the given plan, or the shipped one with the requested precision.

    Raises `RedlineError` if the machine does not support the precision; `"auto"` keeps that of the shipped plan.
    """
    if given is not None:
        return given
    # The plans are made for DRCT. A rung may not apply to another network.
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
        plan = plan.with_rung(parse_rung("fused_ops(pack=false)"))  # int8 does not support packed layers
    return plan.with_rung(rung)

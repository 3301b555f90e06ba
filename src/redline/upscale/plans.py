"""Which plan the network runs under: the one that was given, or the one shipped for this kind of machine."""

from importlib import resources
from pathlib import Path

from redline.errors import RedlineError
from redline.machine import Machine
from redline.plan import Plan, parse_rung

_PRECISION_RUNGS = ("fp16", "bf16", "int8", "fp8", "autocast")


def choose_plan(machine: Machine, precision: str = "auto", given: Path | None = None) -> Plan:
    """A precision asked for by name that cannot run here is refused; `auto` takes what the machine is good at."""
    if given is not None:
        return Plan.load(given)
    plan = shipped_plan(machine)
    if precision == "auto":
        return _runnable(plan, machine)
    for name in _PRECISION_RUNGS:
        plan = plan.without(name)
    if precision == "fp32":
        return _runnable(plan, machine)
    rung = parse_rung("int8(mode=dynamic)" if precision == "int8" else precision)
    if reason := rung.why_not(machine):
        raise RedlineError(f"{precision} cannot run here: {reason}.")
    return _runnable(plan.with_rung(rung), machine)


def shipped_plan(machine: Machine) -> Plan:
    kind = "cuda" if machine.is_cuda else "cpu"
    return Plan.load(Path(str(resources.files("redline.plans"))) / f"upscale-{kind}.toml")


def _runnable(plan: Plan, machine: Machine) -> Plan:
    """Without the rungs that this machine cannot run; a shipped plan is made for its kind, not for every one of it."""
    return Plan(tuple(rung for rung in plan.rungs if not rung.why_not(machine)))

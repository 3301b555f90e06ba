"""Shipped plans, one for each application and kind of machine."""

from importlib import resources
from pathlib import Path

from redline.ladder.plan import Plan
from redline.machine.machine import Machine


def shipped_plan(application: str, machine: Machine) -> Plan:
    """What the application runs under on this kind of machine, without the rungs that this one cannot run."""
    kind = "cuda" if machine.is_cuda else "cpu"
    plan = Plan.load(Path(str(resources.files(__name__))) / f"{application}-{kind}.toml")
    return Plan(tuple(rung for rung in plan.rungs if not rung.why_not(machine)))

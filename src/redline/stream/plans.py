"""Which plan a stream's model runs under: the one that was given, or the one shipped for this kind of machine."""

from redline.choices import STREAM_PRECISIONS
from redline.errors import RedlineError
from redline.ladder.plan import Plan, parse_rung
from redline.ladder.plans import shipped_plan
from redline.machine.machine import Machine

_PRECISION_RUNGS = ("bf16", "fp16", "autocast", "int8", "fp8", "tf32")


def choose_plan(machine: Machine, precision: str = "auto", given: Plan | None = None) -> Plan:
    """A precision asked for by name that cannot run here is refused; `auto` takes what the machine is good at."""
    if precision not in STREAM_PRECISIONS:
        raise RedlineError(f"there is no precision {precision!r}: choose from {', '.join(STREAM_PRECISIONS)}.")
    if given is not None:
        if precision != "auto":
            raise RedlineError("the plan says the precision: leave out --precision, or --plan.")
        return given
    plan = shipped_plan("stream", machine)
    if precision == "auto":
        return plan
    for name in _PRECISION_RUNGS:
        plan = plan.without(name)
    if precision == "fp32":
        return plan
    rung = parse_rung(precision)
    if reason := rung.why_not(machine):
        raise RedlineError(f"{precision} cannot run here: {reason}.")
    return plan.with_rung(rung)

"""What weights are held in, and the plan that the model runs under: given, or shipped for this kind of machine."""

from dataclasses import dataclass

import torch

from redline.choices import GENERATION_PRECISIONS
from redline.errors import RedlineError
from redline.ladder.plan import Plan, parse_rung
from redline.ladder.plans import shipped_plan
from redline.machine.machine import Machine

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# A step reads every weight once and multiplies little, so the bytes are what counts.
_WEIGHTS_ONLY = {"int8": "int8", "fp8": "fp8(mode=weight_only)"}
_CONVERTING = ("bf16", "fp16", "autocast")


@dataclass(frozen=True)
class Holding:
    """The dtype to read weights in, and the plan to apply to them."""

    dtype: torch.dtype
    plan: Plan


def choose_holding(machine: Machine, precision: str = "auto", given: Plan | None = None) -> Holding:
    """A precision asked for by name that cannot run here is refused; `auto` takes what the machine is good at."""
    if precision not in GENERATION_PRECISIONS:
        raise RedlineError(f"there is no precision {precision!r}: choose from {', '.join(GENERATION_PRECISIONS)}.")
    usual = "bf16" if machine.is_cuda and not machine.why_slow("bf16") else "fp32"
    if given is not None:
        if precision != "auto":
            raise RedlineError("the plan says the precision: leave out --precision, or --plan.")
        converts = any(name in given for name in _CONVERTING)
        return Holding(_DTYPES["fp32" if converts else usual], given)
    plan = shipped_plan("generate", machine)
    if precision in _WEIGHTS_ONLY:
        rung = parse_rung(_WEIGHTS_ONLY[precision])
        if reason := rung.why_not(machine):
            raise RedlineError(f"{precision} cannot run here: {reason}.")
        return Holding(_DTYPES[usual], plan.with_rung(rung))
    return Holding(_DTYPES[usual if precision == "auto" else precision], plan)

"""Chooses the dtype of the weights and the plan: given, or the one shipped for this kind of machine."""

from dataclasses import dataclass

import torch

from redline.choices import GENERATION_PRECISIONS
from redline.errors import RedlineError
from redline.ladder.plan import Plan, parse_rung
from redline.ladder.plans import shipped_plan
from redline.machine.machine import Machine

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# A decode step is limited by reading the weights, so their size counts, not the arithmetic.
_WEIGHTS_ONLY = {"int8": "int8", "fp8": "fp8(mode=weight_only)"}
_CONVERTING = ("bf16", "fp16", "autocast")


@dataclass(frozen=True)
class Holding:
    """The dtype to read weights in, and the plan to apply to them."""

    dtype: torch.dtype
    plan: Plan


def choose_holding(machine: Machine, precision: str = "auto", given: Plan | None = None) -> Holding:
    """Chooses bf16 where the GPU has it and fp32 otherwise for `auto`. Raises for a precision that cannot run here."""
    if precision not in GENERATION_PRECISIONS:
        raise RedlineError(f"unknown precision {precision!r}: use one of {', '.join(GENERATION_PRECISIONS)}.")
    usual = "bf16" if machine.is_cuda and not machine.why_slow("bf16") else "fp32"
    if given is not None:
        if precision != "auto":
            raise RedlineError("precision and plan exclude each other: the plan sets the precision.")
        converts = any(name in given for name in _CONVERTING)
        return Holding(_DTYPES["fp32" if converts else usual], given)
    plan = shipped_plan("generate", machine)
    if precision in _WEIGHTS_ONLY:
        rung = parse_rung(_WEIGHTS_ONLY[precision])
        if reason := rung.why_not(machine):
            raise RedlineError(f"{precision} cannot run here: {reason}.")
        return Holding(_DTYPES[usual], plan.with_rung(rung))
    return Holding(_DTYPES[usual if precision == "auto" else precision], plan)

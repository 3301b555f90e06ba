"""Chooses the dtype in which weights are loaded, and the plan that the model runs under."""

from dataclasses import dataclass

import torch

from redline.ladder.plan import Plan
from redline.ladder.plans.choose import choose_plan
from redline.machine.machine import Machine

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_CONVERTING = ("bf16", "fp16", "autocast")


@dataclass(frozen=True)
class Holding:
    """The dtype to load weights in, and the plan to apply to them."""

    dtype: torch.dtype
    plan: Plan


def choose_holding(machine: Machine, precision: str = "auto", given: Plan | None = None) -> Holding:
    """Returns the dtype and the plan. Raises RedlineError if the precision is unknown or cannot run on this machine.

    A plan that converts the model gets fp32 weights. int8 and fp8 quantize only the weights, because a decoding step
    spends most of its time on reading weights.
    """
    plan = choose_plan("generate", machine, precision, given).plan
    usual = "bf16" if machine.is_cuda and not machine.why_slow("bf16") else "fp32"
    if given is not None and any(name in given for name in _CONVERTING):
        usual = "fp32"
    return Holding(_DTYPES.get(precision, _DTYPES[usual]), plan)

"""In which numbers a training computes: weights stay fp32, products may be bf16."""

import warnings
from contextlib import AbstractContextManager, nullcontext

import torch

from redline.machine.ceilings import with_ceilings
from redline.machine.machine import Machine


def resolve_precision(precision: str, device: torch.device) -> str:
    """What was asked for, where the device is fast at it; fp32 with a warning elsewhere."""
    if precision != "fp32" and (reason := _why_not(precision, device)):
        warnings.warn(f"{reason}: this training computes in fp32.", stacklevel=2)
        return "fp32"
    return precision


def _why_not(precision: str, device: torch.device) -> str:
    machine = Machine.detect(str(device))
    if precision not in machine.hardware_dtypes:
        return f"{device} has no {precision} in hardware"
    if machine.is_cuda:
        return ""
    # A CPU may list what torch has no products for: seconds of measuring, once, against hours of emulation.
    measured = machine if machine.ceilings else with_ceilings(machine)
    return measured.why_slow(precision, "matmul")


def computing_in(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Around a forward pass and its loss."""
    return torch.autocast(device.type, torch.bfloat16) if precision == "bf16" else nullcontext()

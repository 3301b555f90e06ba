"""The precision of a training: weights stay fp32, matrix products may be bf16."""

import warnings
from contextlib import AbstractContextManager, nullcontext

import torch

from redline.machine.ceilings import with_ceilings
from redline.machine.machine import Machine


def resolve_precision(precision: str, device: torch.device) -> str:
    """Returns `precision` if the device is fast in it; otherwise warns and returns fp32. "auto" is bf16 on a GPU."""
    if precision == "auto":
        machine = Machine.detect(str(device))
        return "bf16" if "bf16" in machine.hardware_dtypes and machine.is_cuda else "fp32"
    if precision in ("bf16", "fp16") and (reason := _why_not(precision, device)):
        warnings.warn(f"{reason}: this training uses fp32.", stacklevel=2)
        return "fp32"
    return precision


def _why_not(precision: str, device: torch.device) -> str:
    machine = Machine.detect(str(device))
    if precision not in machine.hardware_dtypes:
        return f"{device} has no {precision} in hardware"
    if machine.is_cuda:
        return ""
    # A CPU may support a dtype that torch emulates slowly; measuring it takes seconds, once.
    measured = machine if machine.ceilings else with_ceilings(machine)
    return measured.why_slow(precision, "matmul")


def computing_in(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Returns a context manager for a forward pass and its loss: autocast for bf16."""
    return torch.autocast(device.type, torch.bfloat16) if precision == "bf16" else nullcontext()

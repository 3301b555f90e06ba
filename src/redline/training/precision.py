"""In which numbers a training computes: weights stay fp32, products may be bf16."""

import warnings
from contextlib import AbstractContextManager, nullcontext

import torch

from redline.machine import Machine


def resolve_precision(precision: str, device: torch.device) -> str:
    """What was asked for, where the device has it in hardware; fp32 with a warning elsewhere."""
    if precision != "fp32" and precision not in Machine.detect(str(device)).hardware_dtypes:
        warnings.warn(f"{device} has no {precision} in hardware: this training computes in fp32.", stacklevel=2)
        return "fp32"
    return precision


def computing_in(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Around a forward pass and its loss."""
    return torch.autocast(device.type, torch.bfloat16) if precision == "bf16" else nullcontext()

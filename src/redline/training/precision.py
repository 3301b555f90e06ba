"""Sets the precision of training: weights stay fp32, matrix products may be in bf16 or, with torchao, in fp8.

In fp8, the three matrix products of large linear layers are scaled dynamically. Embedding, norms, attention and the
output layer stay in bf16, where fp8 would cost accuracy and save little.
"""

import warnings
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from redline.errors import RedlineError
from redline.machine.ceilings import with_ceilings
from redline.machine.machine import Machine
from redline.machine.quiet import quiet

# torch._scaled_mm needs multiples of 16; below the minimum width, scaling costs more than fp8 saves.
_MULTIPLE = 16
_MIN_FEATURES = 256


def resolve_precision(precision: str, device: torch.device) -> str:
    """Returns `precision` if the device is fast in it; otherwise warns and returns fp32. "auto" means bf16 on a GPU."""
    if precision == "auto":
        machine = Machine.detect(str(device))
        return "bf16" if "bf16" in machine.hardware_dtypes and machine.is_cuda else "fp32"
    if precision in ("bf16", "fp16") and (reason := _why_not(precision, device)):
        warnings.warn(f"{reason}: training in fp32.", stacklevel=2)
        return "fp32"
    return precision


def _why_not(precision: str, device: torch.device) -> str:
    machine = Machine.detect(str(device))
    if precision not in machine.hardware_dtypes:
        return f"{device} has no {precision} in hardware"
    if machine.is_cuda:
        return ""
    # torch may emulate a dtype slowly on a CPU; finding out takes a measurement of a few seconds, once per machine.
    measured = machine if machine.ceilings else with_ceilings(machine)
    return measured.why_slow(precision, "matmul")


def computing_in(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Returns a context manager for a forward pass and its loss: autocast for bf16."""
    return torch.autocast(device.type, torch.bfloat16) if precision == "bf16" else nullcontext()


def why_no_fp8(machine: Machine) -> str:
    """Returns why this machine cannot train in fp8, or ""."""
    if "fp8" not in machine.hardware_dtypes:
        return f"{machine.name} has no fp8 arithmetic (NVIDIA Ada, Hopper or newer has)"
    return "" if machine.has("torchao") else "fp8 layers need torchao, which is not installed: pip install torchao"


def is_large(layer: nn.Module, name: str) -> bool:
    """Returns whether a layer is a linear layer large enough for fp8, and not the output layer."""
    if not isinstance(layer, nn.Linear) or name.rpartition(".")[2] == "head":
        return False
    sizes = (layer.in_features, layer.out_features)
    return all(size % _MULTIPLE == 0 and size >= _MIN_FEATURES for size in sizes)


def to_fp8(model: nn.Module) -> int:
    """Replaces the large linear layers in place, keeping their parameters. Returns how many."""
    chosen = [name for name, layer in model.named_modules() if is_large(layer, name)]
    if not chosen:
        raise RedlineError(f'precision = "fp8" has no effect: no linear layer is at least {_MIN_FEATURES} wide.')
    with quiet():
        from torchao.float8 import convert_to_float8_training

        convert_to_float8_training(model, module_filter_fn=is_large)
    return len(chosen)

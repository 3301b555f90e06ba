"""fp8 training of large linear layers with torchao, which runs their three matrix products in fp8.

Inputs, weights and gradients are scaled dynamically. Embedding, norms, attention and the output layer stay in bf16,
where fp8 would cost accuracy and save little.
"""

from torch import nn

from redline.errors import RedlineError
from redline.machine.machine import Machine
from redline.quiet import quiet

# torch._scaled_mm needs multiples of 16; below the minimum width, scaling costs more than fp8 saves.
_MULTIPLE = 16
_MIN_FEATURES = 256


def why_no_fp8(machine: Machine) -> str:
    """Returns why this machine cannot train in fp8, or ""."""
    if "fp8" not in machine.hardware_dtypes:
        return f"{machine.name} has no fp8 arithmetic (NVIDIA Ada, Hopper or newer has)"
    return "" if machine.has("torchao") else "fp8 layers are torchao's, which is not installed: pip install torchao"


def is_large(layer: nn.Module, name: str) -> bool:
    """Whether a layer is a linear layer large enough for fp8, and not the output layer."""
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

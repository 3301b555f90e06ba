"""fp8 for the large products of a training: torchao's linear layers, whose three products run in 8-bit floats.

Inputs, weights and gradients are scaled as they come. Embedding, norms, attention and the output layer stay in bf16:
there fp8 would cost accuracy and save little.
"""

from torch import nn

from redline.errors import RedlineError
from redline.machine.machine import Machine
from redline.quiet import quiet

# torch._scaled_mm reads both operands in steps of 16 bytes; below this width scaling costs more than fp8 saves.
_MULTIPLE = 16
_LEAST_FEATURES = 256


def why_no_fp8(machine: Machine) -> str:
    """A sentence when this machine cannot train in fp8."""
    if "fp8" not in machine.hardware_dtypes:
        return f"{machine.name} has no fp8 arithmetic (NVIDIA Ada, Hopper or newer has)"
    return "" if machine.has("torchao") else "fp8 layers are torchao's, which is not installed: pip install torchao"


def is_large(layer: nn.Module, name: str) -> bool:
    """Whether a layer is worth it: a wide product of whole tiles that is not the output layer."""
    if not isinstance(layer, nn.Linear) or name.rpartition(".")[2] == "head":
        return False
    sizes = (layer.in_features, layer.out_features)
    return all(size % _MULTIPLE == 0 and size >= _LEAST_FEATURES for size in sizes)


def to_fp8(model: nn.Module) -> int:
    """Exchanges the large linear layers, whose weights stay the same objects; gives their number."""
    chosen = [name for name, layer in model.named_modules() if is_large(layer, name)]
    if not chosen:
        raise RedlineError(f"no linear layer is {_LEAST_FEATURES} wide or more, so fp8 would have nothing to do.")
    with quiet():
        from torchao.float8 import convert_to_float8_training

        convert_to_float8_training(model, module_filter_fn=is_large)
    return len(chosen)

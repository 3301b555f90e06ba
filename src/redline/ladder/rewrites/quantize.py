"""What int8 and fp8 share: linear layers under the user's names, quantizing one, and what is really stored.

torchao is imported inside functions only: it takes seconds to start, and most plans never need it.
"""

import importlib.util
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from redline.errors import RungError
from redline.ladder.job import Job
from redline.ladder.rewrites.io_adapter import unwrapped
from redline.notation import format_bytes
from redline.quiet import quiet


def why_no_torchao() -> str:
    if importlib.util.find_spec("torchao") is None:
        return 'torchao is not installed: pip install "redline[int8]"'
    return ""


def torchao_quantization() -> Any:
    """The module `torchao.quantization`, imported without its log lines."""
    with quiet():
        import torchao.quantization

        return torchao.quantization


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Every linear layer that is called as one, under the user's names.

    The output projection of `nn.MultiheadAttention` is left out: its weight is read without calling it.
    """
    return {
        name: module
        for name, module in unwrapped(model).named_modules()
        if isinstance(module, nn.Linear)
        and not isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear)
        and isinstance(module.weight, nn.Parameter)
    }


def choose_layers(rung: str, model: nn.Module, skip: Iterable[str], min_features: int) -> dict[str, nn.Linear]:
    """The layers to quantize: wide enough, and neither named in `skip` nor inside a module that is."""
    names = {name for name, _ in unwrapped(model).named_modules()}
    skip = tuple(skip)
    unknown = [name for name in skip if name not in names]
    if unknown:
        raise RungError(f"{rung}: skip names {unknown[0]!r}, but the model has no module of that name.")
    return {
        name: layer
        for name, layer in linear_layers(model).items()
        if min(layer.in_features, layer.out_features) >= min_features
        and not any(name == left or name.startswith(f"{left}.") for left in skip)
    }


def why_no_layers(chosen: Mapping[str, nn.Linear], model: nn.Module, otherwise: str) -> str:
    """A sentence when there is nothing to quantize."""
    if chosen:
        return ""
    found = linear_layers(model)
    if not found:
        return f"the model has no linear layer, the only kind that torchao quantizes here{otherwise}"
    return f"none of the model's {len(found)} linear layers is left (too small, of odd sizes, or skipped)"


def quantize_layer(rung: str, name: str, layer: nn.Linear, config: Any) -> None:
    """Replaces one layer's weight; a NaN would become an ordinary number, so it is refused first."""
    if not bool(torch.isfinite(layer.weight).all()):
        raise RungError(f"{rung}: the weight of layer {name!r} holds a NaN or an infinity.")
    with quiet():
        torchao_quantization().quantize_(layer, config, filter_fn=lambda module, _: module is layer)
    if not is_quantized(layer.weight):
        raise RungError(f"{rung}: torchao left layer {name!r} of shape {tuple(layer.weight.shape)} unquantized.")


def is_quantized(weight: Tensor) -> bool:
    """Whether a weight is one of torchao's tensor classes, and not a plain tensor."""
    return type(weight).__module__.partition(".")[0] == "torchao"


def stored_bytes(tensor: Tensor) -> int:
    """The bytes that a tensor really takes; a torchao tensor reports the size it would have unquantized."""
    if not is_quantized(tensor):
        return tensor.nbytes
    names, _ = tensor.__tensor_flatten__()  # pyright: ignore[reportAttributeAccessIssue]
    return sum(stored_bytes(part) for name in names if isinstance(part := getattr(tensor, name), Tensor))


@dataclass(frozen=True)
class Quantized:
    """What a quantizing rung leaves for its proof."""

    dtype: str
    mode: str
    bytes_before: int
    remarks: tuple[str, ...] = ()

    def proof(self, model: nn.Module) -> str:
        layers = [m for m in model.modules() if isinstance(m, nn.Linear)]
        changed = [m for m in layers if is_quantized(m.weight)]
        if not changed:
            return ""
        mode = self.mode.replace("_", " ")
        after = sum(stored_bytes(m.weight) for m in layers)
        parts = [
            f"{len(changed)} of {len(layers)} linear layers hold {self.dtype} weights ({mode})",
            f"their weights went from {format_bytes(self.bytes_before)} to {format_bytes(after)}",
            *self.remarks,
        ]
        return "; ".join(parts)


def weights_before(model: nn.Module) -> int:
    return sum(m.weight.nbytes for m in model.modules() if isinstance(m, nn.Linear))


def without_replaced(job: Job) -> Job:
    """Forgets parameters that are no longer in the model, so that their memory is given back."""
    alive = {id(p) for p in job.model.parameters()}
    return replace(job, parameters={name: p for name, p in job.parameters.items() if id(p) in alive})

"""The share of attention in a step, and the kernels that compute it.

Attention is found by following the data through one step, not by class names:
- a call of `scaled_dot_product_attention` (or of torch's fused multi-head attention), or
- a product of two activations, followed by a softmax, followed by another product of activations.
A product with a weight is a projection and does not count, so the softmax of a classifier is not mistaken for
attention. The attention layer is the innermost layer that contains all of these operations.
"""

import itertools
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from redline.ladder.gate import tensors_of
from redline.ladder.profile.kernels import KernelTime
from redline.ladder.profile.layers import LayerTime, LayerTimes
from redline.ladder.profile.subject import Subject
from redline.ladder.profile.tracker import FORWARD, OUTSIDE, Tracker

_PRODUCTS = {"aten::bmm", "aten::baddbmm", "aten::mm"}
# Operators that multiply by weights; their results are not followed.
_PROJECTIONS = {"aten::addmm", "aten::linear", "aten::convolution", "aten::_scaled_mm", "aten::_int_mm"}
_SOFTMAXES = {"aten::_softmax": "written out", "aten::_safe_softmax": "SDPA math"}
_FUSED = {
    "aten::_scaled_dot_product_flash_attention": "SDPA flash",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "SDPA flash (CPU)",
    "aten::_scaled_dot_product_efficient_attention": "SDPA memory-efficient",
    "aten::_scaled_dot_product_cudnn_attention": "SDPA cuDNN",
    "aten::_scaled_dot_product_fused_attention_overrideable": "SDPA of the device backend",
    "aten::_scaled_dot_product_attention_math": "SDPA math",
    "aten::_flash_attention_forward": "flash",
    "aten::_efficient_attention_forward": "memory-efficient",
    "redline::causal_attention": "Redline's causal attention",
    "aten::_native_multi_head_attention": "fused multi-head attention",
    "aten::_transformer_encoder_layer_fwd": "fused encoder layer",
}
COUNTED = (
    "layers that call scaled_dot_product_attention or have a softmax between two products of activations; the first "
    "share includes all layers inside them, such as projections, the core only their own time and that of the softmax "
    "and dropout layers inside them"
)
# This operator runs a whole encoder layer, so its time includes the MLP.
_WITH_MLP = "fused encoder layer"
COUNTED_BY_NAME = "kernels with attention in their names, because the layers of this plan cannot be distinguished"


@dataclass(frozen=True)
class AttentionLayer:
    """An attention layer with its kernel and its number of calls per step."""

    name: str
    type: str
    kernel: str
    calls: int
    total_s: float
    core_s: float


@dataclass(frozen=True)
class Attention:
    """The share of a step's time that attention takes, and the share that its core takes (None if unknown).

    The core is attention without the layers inside it, such as projections, but with softmax and dropout. `counted` is
    a sentence that says which layers or kernels were counted.
    """

    layers: tuple[AttentionLayer, ...]
    kernels: tuple[str, ...]
    share: float
    core_share: float | None
    counted: str


def measure_attention(subject: Subject, times: LayerTimes) -> Attention:
    """Finds the attention layers in one step and looks up their times in `times`."""
    found = find_attention(subject)
    rows = {row.name: row for row in times.layers}
    layers = []
    for name, kernels in found.items():
        row = rows.get(name) or LayerTime(name, name, 0, 0.0, 0.0, 0.0, 0.0, 0.0)
        parts = [part for part in rows.values() if _inside(part.name, name) and part.type in ("Softmax", "Dropout")]
        core_s = row.self_s + sum(part.self_s for part in parts)
        kernel = ", ".join(sorted(kernels))
        layers.append(AttentionLayer(name, row.type, kernel, sum(kernels.values()), row.total_s, core_s))
    # Counts only outermost attention layers, whose times include those of the layers inside them.
    outermost = [layer for layer in layers if not any(_inside(layer.name, other.name) for other in layers)]
    kernels = tuple(sorted({kernel for kernels in found.values() for kernel in kernels}))
    with_mlp = "; the time of torch's fused encoder layer includes its MLP" if _WITH_MLP in kernels else ""
    return Attention(
        layers=tuple(layers),
        kernels=kernels,
        share=times.share(sum(layer.total_s for layer in outermost)),
        core_share=times.share(sum(layer.core_s for layer in layers)),
        counted=COUNTED + with_mlp,
    )


def attention_by_kernel(kernels: tuple[KernelTime, ...]) -> Attention:
    """Returns the attention kernels of a compiled model, found by name."""
    hits = [kernel for kernel in kernels if kernel.is_attention]
    return Attention((), tuple(k.name for k in hits), sum(k.share for k in hits), None, COUNTED_BY_NAME)


def _inside(name: str, outer: str) -> bool:
    return name != outer and (outer == "" or name.startswith(f"{outer}."))


def find_attention(subject: Subject) -> dict[str, dict[str, int]]:
    """Returns how often each layer calls each attention kernel in the forward pass of one step."""
    tracker = Tracker(subject)
    follower = _Follower(subject, tracker)
    with tracker, follower:
        subject.step()
    return {name: dict(kernels) for name, kernels in follower.found.items()}


@dataclass(frozen=True)
class _Trail:
    """The origin of a tensor: a product, a softmax after it (if any), and the layers that ran these operations."""

    path: tuple[str, ...]
    softmax: str = ""


class _Follower(TorchDispatchMode):
    """Follows the results of products through later operators, to a softmax and from there to a second product."""

    def __init__(self, subject: Subject, tracker: Tracker) -> None:
        super().__init__()
        self._tracker = tracker
        self._weights: Any = WeakIdKeyDictionary()
        self._trails: Any = WeakIdKeyDictionary()
        for parameter in subject.layers[""].parameters():
            if _has_storage(parameter):
                self._weights[parameter.untyped_storage()] = True
        self.found: dict[str, dict[str, int]] = defaultdict(Counter)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        place = self._tracker.current
        if place.phase != FORWARD:
            return result
        name = func._schema.name
        inputs = tensors_of((args, kwargs))
        storages = [tensor.untyped_storage() for tensor in inputs if _has_storage(tensor)]
        trails = [self._trails[storage] for storage in storages if storage in self._trails]
        trail: _Trail | None = None
        if name in _FUSED:
            self._count(place.path, _FUSED[name])
        elif name in _PRODUCTS:
            if not any(self._is_weight(tensor) for tensor in inputs):
                for softmaxed in [trail for trail in trails if trail.softmax][:1]:
                    self._count(_common(softmaxed.path, place.path), softmaxed.softmax)
                trail = _Trail(place.path)
        elif name in _SOFTMAXES:
            if trails:
                trail = _Trail(_common(trails[0].path, place.path), _SOFTMAXES[name])
        elif trails and name not in _PROJECTIONS:
            trail = trails[0]
        # A weight that was cast, sliced or transposed still counts as a weight.
        from_weights = bool(inputs) and all(self._is_weight(tensor) for tensor in inputs)
        for tensor in tensors_of(result):
            if _has_storage(tensor):
                if from_weights:
                    self._weights[tensor.untyped_storage()] = True
                if trail is not None:
                    self._trails[tensor.untyped_storage()] = trail
                else:
                    self._trails.pop(tensor.untyped_storage(), None)
        return result

    def _is_weight(self, tensor: Tensor) -> bool:
        # A tensor without storage of its own wraps other tensors: it is a quantized weight.
        return not _has_storage(tensor) or tensor.untyped_storage() in self._weights

    def _count(self, path: tuple[str, ...], kernel: str) -> None:
        self.found[path[-1] if path else OUTSIDE][kernel] += 1


def _common(one: tuple[str, ...], other: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the longest common prefix of two paths."""
    return tuple(a for a, b in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _has_storage(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided

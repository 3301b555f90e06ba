"""The operators of ONNX as functions of tensors; their attributes are keyword arguments with ONNX's names."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# The type of arguments that determine shapes. They are known when the graph is converted, and passed as integers.
Ints = Sequence[int]
_ONES = (1, 1, 1)
_ZEROS = (0, 0, 0)


@dataclass(frozen=True)
class Operator:
    """The function of an operator, and the positions of those inputs that determine shapes."""

    function: Callable[..., Any]
    static: tuple[int, ...] = ()


def _gemm(x: Tensor, y: Tensor, c: Any = 0, alpha: float = 1, beta: float = 1, transA: int = 0, transB: int = 0):
    return alpha * ((x.mT if transA else x) @ (y.mT if transB else y)) + beta * c


def _reshape(x: Tensor, shape: Ints, allowzero: int = 0) -> Tensor:
    return x.reshape([x.shape[i] if size == 0 and not allowzero else size for i, size in enumerate(shape)])


def _unsqueeze(x: Tensor, axes: Ints) -> Tensor:
    rank = x.ndim + len(axes)
    return reduce(torch.unsqueeze, sorted(axis % rank for axis in axes), x)


def _split(x: Tensor, split: Ints | None = None, axis: int = 0, num_outputs: int = 0) -> tuple[Tensor, ...]:
    return x.split(list(split) if split is not None else -(-x.shape[axis] // num_outputs), axis)


def _slice(x: Tensor, starts: Ints, ends: Ints, axes: Ints | None = None, steps: Ints | None = None) -> Tensor:
    axes = range(len(starts)) if axes is None else axes
    for start, end, axis, step in zip(starts, ends, axes, steps or [1] * len(starts), strict=True):
        places = torch.tensor(range(x.shape[axis])[start:end:step], dtype=torch.long, device=x.device)
        plain = (slice(None),) * (axis % x.ndim) + (slice(start, end, step),)
        x = x[plain] if step > 0 else x.index_select(axis, places)
    return x


def _gather(x: Tensor, indices: Tensor, axis: int = 0) -> Tensor:
    axis %= x.ndim
    picked = x.index_select(axis, torch.where(indices < 0, indices + x.shape[axis], indices).flatten())
    return picked.reshape(*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])


def _gather_nd(x: Tensor, indices: Tensor, batch_dims: int = 0) -> Tensor:
    sizes = indices.shape[:-1]
    outer = [torch.arange(sizes[i], device=x.device).view(-1, *_ONES[: len(sizes) - i - 1]) for i in range(batch_dims)]
    return x[(*outer, *indices.unbind(-1))]


def _depth_to_space(x: Tensor, blocksize: int, mode: str = "DCR") -> Tensor:
    if mode == "DCR":  # the channel axis is (position in block, channel); pixel_shuffle expects the reverse
        x = x.unflatten(1, (blocksize**2, -1)).transpose(1, 2).flatten(1, 2)
    return F.pixel_shuffle(x, blocksize)


def _around(pads: Ints) -> list[int]:
    """Converts ONNX's pads to the order of `F.pad`, which starts with the last axis."""
    half = len(pads) // 2
    return [amount for axis in reversed(range(half)) for amount in (pads[axis], pads[axis + half])]


def _pad(x: Tensor, pads: Ints, value: Any = None, axes: Ints | None = None, mode: str = "constant") -> Tensor:
    half, amounts = len(pads) // 2, [0] * (2 * x.ndim)
    for i, axis in enumerate(axes or range(half)):
        amounts[axis % x.ndim], amounts[axis % x.ndim + x.ndim] = pads[i], pads[i + half]
    if mode == "constant":
        return F.pad(x, _around(amounts), value=float(value[0] if isinstance(value, list) else value or 0))
    flat = _around(amounts)[: 2 * (x.ndim - 2)]
    return F.pad(x, flat, mode={"edge": "replicate", "reflect": "reflect", "wrap": "circular"}[mode])


def _reduced(function: Callable[..., Tensor], x: Tensor, axes: Ints | None = None, keepdims=1, **_: Any) -> Tensor:
    return function(x, dim=tuple(axes or range(x.ndim)), keepdim=bool(keepdims))


def _max_pool(x: Tensor, kernel_shape: Ints, strides=_ONES, pads=(), dilations=_ONES, ceil_mode=0) -> Tensor:
    run, rank = {3: F.max_pool1d, 4: F.max_pool2d, 5: F.max_pool3d}[x.ndim], x.ndim - 2
    x = F.pad(x, _around(pads), value=float("-inf"))
    return run(x, list(kernel_shape), list(strides[:rank]), 0, list(dilations[:rank]), bool(ceil_mode))


def _average_pool(x: Tensor, kernel_shape: Ints, strides=_ONES, pads=_ZEROS, ceil_mode=0, count_include_pad=0, **_):
    run, rank = {3: F.avg_pool1d, 4: F.avg_pool2d, 5: F.avg_pool3d}[x.ndim], x.ndim - 2
    sizes = (list(kernel_shape), list(strides[:rank]), list(pads[:rank]))
    return run(x, *sizes, bool(ceil_mode), bool(count_include_pad))


def _conv(x: Tensor, weight: Tensor, bias=None, strides=_ONES, pads=(), dilations=_ONES, group=1, **_: Any) -> Tensor:
    run, rank = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}[x.ndim], x.ndim - 2
    return run(F.pad(x, _around(pads)), weight, bias, list(strides[:rank]), 0, list(dilations[:rank]), group)


def _conv_transpose(
    x: Tensor,
    weight: Tensor,
    bias=None,
    strides=_ONES,
    pads=_ZEROS,
    output_padding=_ZEROS,
    dilations=_ONES,
    group=1,
    **_,
) -> Tensor:
    run = {3: F.conv_transpose1d, 4: F.conv_transpose2d, 5: F.conv_transpose3d}[x.ndim]
    strides, pads, extra, dilations = (list(v[: x.ndim - 2]) for v in (strides, pads, output_padding, dilations))
    return run(x, weight, bias, strides, pads, extra, group, dilations)


def _resize(x: Tensor, _roi=None, scales: Any = None, sizes=None, mode="nearest", **options: Any) -> Tensor:
    place = options.get("coordinate_transformation_mode", "half_pixel")
    size = sizes[2:] if sizes else [int(n * s) for n, s in zip(x.shape[2:], scales[2:], strict=True)]
    if mode == "nearest":
        return F.interpolate(x, size, mode="nearest" if place == "asymmetric" else "nearest-exact")
    kind = {"linear": {3: "linear", 4: "bilinear", 5: "trilinear"}[x.ndim], "cubic": "bicubic"}[mode]
    return F.interpolate(x, size, mode=kind, align_corners=place == "align_corners")


_SAME_NAME = "add sub mul pow sqrt exp log neg abs erf tanh sigmoid relu sin cos floor ceil reciprocal round sign"
_OTHER_NAME = {
    "MatMul": torch.matmul,
    "PRelu": torch.prelu,
    "Not": torch.logical_not,
    "And": torch.logical_and,
    "Or": torch.logical_or,
    "Equal": torch.eq,
    "Less": torch.lt,
    "LessOrEqual": torch.le,
    "Greater": torch.gt,
    "GreaterOrEqual": torch.ge,
    "Softplus": F.softplus,
    "HardSwish": F.hardswish,
    "Mish": F.mish,
    "Gemm": _gemm,
    "Gather": _gather,
    "GatherElements": lambda x, i, axis=0: x.gather(axis, torch.where(i < 0, i + x.shape[axis], i)),
    "GatherND": _gather_nd,
    "DepthToSpace": _depth_to_space,
    "IsNaN": torch.isnan,
    "CumSum": lambda x, axis, **_: x.cumsum(int(axis)),
    "Trilu": lambda x, k=0, upper=1: x.triu(int(k)) if upper else x.tril(int(k)),
    "MaxPool": _max_pool,
    "AveragePool": _average_pool,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "Div": lambda x, y: torch.div(x, y, rounding_mode=None if x.is_floating_point() else "trunc"),
    "Where": lambda condition, x, y: torch.where(condition.bool(), x, y),
    "Min": lambda *tensors: reduce(torch.minimum, tensors),
    "Max": lambda *tensors: reduce(torch.maximum, tensors),
    "Gelu": lambda x, approximate="none": F.gelu(x, approximate=approximate),
    "LeakyRelu": lambda x, alpha=0.01: F.leaky_relu(x, alpha),
    "Elu": lambda x, alpha=1.0: F.elu(x, alpha),
    "HardSigmoid": lambda x, alpha=0.2, beta=0.5: (alpha * x + beta).clamp(0, 1),
    "Softmax": lambda x, axis=-1: x.softmax(axis),
    "LogSoftmax": lambda x, axis=-1: x.log_softmax(axis),
    "Cast": lambda x, to, **_: x.to(to),
    "Transpose": lambda x, perm=(): x.permute(*(perm or reversed(range(x.ndim)))),
    "Flatten": lambda x, axis=1: x.reshape(x.shape[:axis].numel(), -1),
    "Concat": lambda *tensors, axis: torch.cat(tensors, axis),
    "ArgMax": lambda x, axis=0, keepdims=1, **_: x.argmax(axis, keepdim=bool(keepdims)),
    "GlobalAveragePool": lambda x: x.mean(tuple(range(2, x.ndim)), keepdim=True),
    "BatchNormalization": lambda x, w, b, mean, var, epsilon=1e-5: F.batch_norm(x, mean, var, w, b, eps=epsilon),
    "LayerNormalization": lambda x, w, b=None, axis=-1, epsilon=1e-5: F.layer_norm(x, x.shape[axis:], w, b, epsilon),
    "InstanceNormalization": lambda x, w, b, epsilon=1e-5: F.instance_norm(x, weight=w, bias=b, eps=epsilon),
    "GroupNormalization": lambda x, w, b, num_groups, epsilon=1e-5: F.group_norm(x, num_groups, w, b, epsilon),
    "Einsum": lambda *tensors, equation: torch.einsum(equation, *tensors),
    "Identity": lambda x: x,
    "Dropout": lambda x, *_, **__: x,
}
_WITH_SHAPES = {
    "Clip": (lambda x, low=None, high=None: x if low is None and high is None else x.clamp(low, high), 2),
    "Squeeze": (lambda x, axes=None: x.squeeze() if axes is None else x.squeeze(tuple(axes)), 1),
    "Expand": (lambda x, shape: x.expand(torch.broadcast_shapes(x.shape, tuple(shape))), 1),
    "Tile": (lambda x, repeats: x.repeat(*repeats), 1),
    "Reshape": (_reshape, 1),
    "Unsqueeze": (_unsqueeze, 1),
    "Split": (_split, 1),
    "Slice": (_slice, 4),
    "Pad": (_pad, 3),
    "Resize": (_resize, 3),
    "ReduceMean": (partial(_reduced, torch.mean), 1),
    "ReduceSum": (partial(_reduced, torch.sum), 1),
    "ReduceMax": (partial(_reduced, torch.amax), 1),
    "ReduceMin": (partial(_reduced, torch.amin), 1),
    "ReduceL2": (partial(_reduced, torch.norm), 1),
}
OPERATORS = {
    **{name.title(): Operator(getattr(torch, name)) for name in _SAME_NAME.split()},
    **{name: Operator(function) for name, function in _OTHER_NAME.items()},
    **{name: Operator(function, tuple(range(1, count + 1))) for name, (function, count) in _WITH_SHAPES.items()},
}

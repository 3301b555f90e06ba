"""The operators of ONNX as functions of tensors; their attributes are keyword arguments with ONNX's names."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

# Values that decide on shapes are known when a graph is converted, and are passed as lists of integers.
Ints = Sequence[int]


def div(x: Tensor, y: Tensor) -> Tensor:
    return torch.div(x, y) if x.is_floating_point() else torch.div(x, y, rounding_mode="trunc")


def matmul(x: Tensor, y: Tensor) -> Tensor:
    return torch.matmul(x, y)


def gemm(
    x: Tensor, y: Tensor, c: Any = 0, alpha: float = 1, beta: float = 1, transA: int = 0, transB: int = 0
) -> Tensor:
    return alpha * ((x.mT if transA else x) @ (y.mT if transB else y)) + beta * c


def where(condition: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return torch.where(condition.bool(), x, y)


def smallest(*tensors: Tensor) -> Tensor:
    first, *others = tensors
    for other in others:
        first = torch.minimum(first, other)
    return first


def largest(*tensors: Tensor) -> Tensor:
    first, *others = tensors
    for other in others:
        first = torch.maximum(first, other)
    return first


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    return F.gelu(x, approximate=approximate)


def leaky_relu(x: Tensor, alpha: float = 0.01) -> Tensor:
    return F.leaky_relu(x, alpha)


def elu(x: Tensor, alpha: float = 1.0) -> Tensor:
    return F.elu(x, alpha)


def hard_sigmoid(x: Tensor, alpha: float = 0.2, beta: float = 0.5) -> Tensor:
    return (alpha * x + beta).clamp(0, 1)


def clip(x: Tensor, min: Any = None, max: Any = None) -> Tensor:
    return x if min is None and max is None else x.clamp(min, max)


def softmax(x: Tensor, axis: int = -1) -> Tensor:
    return x.softmax(axis)


def log_softmax(x: Tensor, axis: int = -1) -> Tensor:
    return x.log_softmax(axis)


def cast(x: Tensor, to: torch.dtype) -> Tensor:
    return x.to(to)


def reshape(x: Tensor, shape: Ints, allowzero: int = 0) -> Tensor:
    return x.reshape([x.shape[i] if size == 0 and not allowzero else size for i, size in enumerate(shape)])


def transpose(x: Tensor, perm: Ints = ()) -> Tensor:
    return x.permute(*(perm or reversed(range(x.ndim))))


def flatten(x: Tensor, axis: int = 1) -> Tensor:
    return x.reshape(int(np.prod(x.shape[:axis])), -1)


def squeeze(x: Tensor, axes: Ints | None = None) -> Tensor:
    return x.squeeze() if axes is None else x.squeeze(tuple(axes))


def unsqueeze(x: Tensor, axes: Ints) -> Tensor:
    rank = x.ndim + len(axes)
    for axis in sorted(axis % rank for axis in axes):
        x = x.unsqueeze(axis)
    return x


def concat(*tensors: Tensor, axis: int) -> Tensor:
    return torch.cat(tensors, axis)


def split(x: Tensor, split: Ints | None = None, axis: int = 0, num_outputs: int = 0) -> tuple[Tensor, ...]:
    return x.split(list(split) if split is not None else -(-x.shape[axis] // num_outputs), axis)


def slice_(x: Tensor, starts: Ints, ends: Ints, axes: Ints | None = None, steps: Ints | None = None) -> Tensor:
    axes = range(len(starts)) if axes is None else axes
    for start, end, axis, step in zip(starts, ends, axes, steps or [1] * len(starts), strict=True):
        if step < 0:
            x = x.index_select(axis, torch.arange(x.shape[axis], device=x.device)[slice(start, end)].flip(0)[::-step])
        else:
            x = x[(slice(None),) * (axis % x.ndim) + (slice(start, end, step),)]
    return x


def gather(x: Tensor, indices: Tensor, axis: int = 0) -> Tensor:
    indices = torch.where(indices < 0, indices + x.shape[axis], indices)
    picked = x.index_select(axis, indices.flatten())
    return picked.reshape(*x.shape[: axis % x.ndim], *indices.shape, *x.shape[axis % x.ndim + 1 :])


def expand(x: Tensor, shape: Ints) -> Tensor:
    return x.expand(torch.broadcast_shapes(x.shape, tuple(shape)))


def tile(x: Tensor, repeats: Ints) -> Tensor:
    return x.repeat(*repeats)


def pad(x: Tensor, pads: Ints, value: Any = None, axes: Ints | None = None, mode: str = "constant") -> Tensor:
    half = len(pads) // 2
    amounts = {axis % x.ndim: (pads[i], pads[i + half]) for i, axis in enumerate(axes or range(half))}
    flat = [amount for axis in reversed(range(x.ndim)) for amount in amounts.get(axis, (0, 0))]
    if mode == "constant":
        return F.pad(x, flat, value=float(np.asarray(value).item()) if value is not None else 0.0)
    while flat[-2:] == [0, 0]:
        flat = flat[:-2]
    return F.pad(x, flat, mode={"edge": "replicate", "reflect": "reflect", "wrap": "circular"}[mode])


def reduce_mean(x: Tensor, axes: Ints | None = None, keepdims: int = 1, noop_with_empty_axes: int = 0) -> Tensor:
    return x.mean(tuple(axes or range(x.ndim)), keepdim=bool(keepdims))


def reduce_sum(x: Tensor, axes: Ints | None = None, keepdims: int = 1, noop_with_empty_axes: int = 0) -> Tensor:
    return x.sum(tuple(axes or range(x.ndim)), keepdim=bool(keepdims))


def reduce_max(x: Tensor, axes: Ints | None = None, keepdims: int = 1, noop_with_empty_axes: int = 0) -> Tensor:
    return x.amax(tuple(axes or range(x.ndim)), keepdim=bool(keepdims))


def reduce_min(x: Tensor, axes: Ints | None = None, keepdims: int = 1, noop_with_empty_axes: int = 0) -> Tensor:
    return x.amin(tuple(axes or range(x.ndim)), keepdim=bool(keepdims))


def reduce_l2(x: Tensor, axes: Ints | None = None, keepdims: int = 1, noop_with_empty_axes: int = 0) -> Tensor:
    return x.norm(dim=tuple(axes or range(x.ndim)), keepdim=bool(keepdims))


def arg_max(x: Tensor, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Tensor:
    return x.argmax(axis, keepdim=bool(keepdims))


def global_average_pool(x: Tensor) -> Tensor:
    return x.mean(tuple(range(2, x.ndim)), keepdim=True)


def max_pool(
    x: Tensor,
    kernel_shape: Ints,
    strides: Ints = (),
    pads: Ints = (),
    dilations: Ints = (1,),
    ceil_mode: int = 0,
) -> Tensor:
    x = F.pad(x, _around(pads), value=float("-inf"))
    pooled = {3: F.max_pool1d, 4: F.max_pool2d, 5: F.max_pool3d}[x.ndim]
    rank = len(kernel_shape)
    strides = strides or [1] * rank
    dilations = dilations if len(dilations) == rank else [1] * rank
    return pooled(x, list(kernel_shape), list(strides), 0, list(dilations), bool(ceil_mode))


def average_pool(
    x: Tensor,
    kernel_shape: Ints,
    strides: Ints = (),
    pads: Ints = (),
    ceil_mode: int = 0,
    count_include_pad: int = 0,
    dilations: Ints = (),
) -> Tensor:
    pooled = {3: F.avg_pool1d, 4: F.avg_pool2d, 5: F.avg_pool3d}[x.ndim]
    padding = list(pads[: len(kernel_shape)]) or 0
    return pooled(
        x,
        list(kernel_shape),
        list(strides or [1] * len(kernel_shape)),
        padding,
        bool(ceil_mode),
        bool(count_include_pad),
    )


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    strides: Ints = (),
    pads: Ints = (),
    dilations: Ints = (),
    group: int = 1,
    kernel_shape: Ints = (),
) -> Tensor:
    rank = weight.ndim - 2
    x = F.pad(x, _around(pads)) if any(pads) else x
    run = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[rank]
    return run(x, weight, bias, list(strides or [1] * rank), 0, list(dilations or [1] * rank), group)


def transposed_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    strides: Ints = (),
    pads: Ints = (),
    dilations: Ints = (),
    group: int = 1,
    kernel_shape: Ints = (),
    output_padding: Ints = (),
) -> Tensor:
    rank = weight.ndim - 2
    run = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}[rank]
    extra, padding = list(output_padding or [0] * rank), list(pads[:rank] or [0] * rank)
    return run(x, weight, bias, list(strides or [1] * rank), padding, extra, group, list(dilations or [1] * rank))


def batch_norm(
    x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, variance: Tensor, epsilon: float = 1e-5, momentum: float = 0.9
) -> Tensor:
    return F.batch_norm(x, mean, variance, scale, bias, False, 0.0, epsilon)


def layer_norm(x: Tensor, scale: Tensor, bias: Tensor | None = None, axis: int = -1, epsilon: float = 1e-5) -> Tensor:
    return F.layer_norm(x, x.shape[axis:], scale, bias, epsilon)


def instance_norm(x: Tensor, scale: Tensor, bias: Tensor, epsilon: float = 1e-5) -> Tensor:
    return F.instance_norm(x, weight=scale, bias=bias, eps=epsilon)


def group_norm(x: Tensor, scale: Tensor, bias: Tensor, num_groups: int, epsilon: float = 1e-5) -> Tensor:
    return F.group_norm(x, num_groups, scale, bias, epsilon)


def resize(
    x: Tensor,
    _: Any = None,
    scales: Any = None,
    sizes: Ints | None = None,
    mode: str = "nearest",
    coordinate_transformation_mode: str = "half_pixel",
    nearest_mode: str = "round_prefer_floor",
    **rest: Any,
) -> Tensor:
    size = (
        list(sizes)[2:]
        if sizes is not None
        else [int(n * s) for n, s in zip(x.shape[2:], list(scales)[2:], strict=True)]
    )
    if mode == "nearest":
        return F.interpolate(
            x, size, mode="nearest" if coordinate_transformation_mode == "asymmetric" else "nearest-exact"
        )
    kind = {"linear": {3: "linear", 4: "bilinear", 5: "trilinear"}[x.ndim], "cubic": "bicubic"}[mode]
    return F.interpolate(x, size, mode=kind, align_corners=coordinate_transformation_mode == "align_corners")


def depth_to_space(x: Tensor, blocksize: int, mode: str = "DCR") -> Tensor:
    if mode == "CRD":
        return F.pixel_shuffle(x, blocksize)
    batch, channels, height, width = x.shape
    x = x.reshape(batch, blocksize, blocksize, channels // blocksize**2, height, width)
    return x.permute(0, 3, 4, 1, 5, 2).reshape(batch, -1, height * blocksize, width * blocksize)


def einsum(*tensors: Tensor, equation: str) -> Tensor:
    return torch.einsum(equation, *tensors)


def identity(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return x


def _around(pads: Ints) -> list[int]:
    half = len(pads) // 2
    return [amount for axis in reversed(range(half)) for amount in (pads[axis], pads[axis + half])]


@dataclass(frozen=True)
class Operator:
    """A function, and the places of its inputs that decide on shapes."""

    function: Any
    static: tuple[int, ...] = ()


_PLAIN = {
    "Add": torch.add, "Sub": torch.sub, "Mul": torch.mul, "Div": div, "Pow": torch.pow, "Sqrt": torch.sqrt,
    "Exp": torch.exp, "Log": torch.log, "Neg": torch.neg, "Abs": torch.abs, "Erf": torch.erf, "Tanh": torch.tanh,
    "Sigmoid": torch.sigmoid, "Relu": torch.relu, "Sin": torch.sin, "Cos": torch.cos, "Floor": torch.floor,
    "Ceil": torch.ceil, "Reciprocal": torch.reciprocal, "Not": torch.logical_not, "And": torch.logical_and,
    "Or": torch.logical_or, "Equal": torch.eq, "Less": torch.lt, "LessOrEqual": torch.le, "Greater": torch.gt,
    "GreaterOrEqual": torch.ge, "Where": where, "Min": smallest, "Max": largest, "Softplus": F.softplus, "Gelu": gelu,
    "LeakyRelu": leaky_relu, "Elu": elu, "PRelu": torch.prelu, "HardSigmoid": hard_sigmoid, "HardSwish": F.hardswish,
    "Mish": F.mish, "Softmax": softmax, "LogSoftmax": log_softmax, "Cast": cast, "Transpose": transpose,
    "Flatten": flatten, "Concat": concat, "Gather": gather, "ArgMax": arg_max, "GlobalAveragePool": global_average_pool,
    "MaxPool": max_pool, "AveragePool": average_pool, "MatMul": matmul, "Gemm": gemm, "Conv": convolution,
    "ConvTranspose": transposed_convolution, "BatchNormalization": batch_norm, "LayerNormalization": layer_norm,
    "InstanceNormalization": instance_norm, "GroupNormalization": group_norm, "DepthToSpace": depth_to_space,
    "Einsum": einsum, "Identity": identity, "Dropout": identity,
}  # fmt: skip
OPERATORS: dict[str, Operator] = {name: Operator(function) for name, function in _PLAIN.items()} | {
    "Clip": Operator(clip, (1, 2)),
    "Reshape": Operator(reshape, (1,)),
    "Squeeze": Operator(squeeze, (1,)),
    "Unsqueeze": Operator(unsqueeze, (1,)),
    "Split": Operator(split, (1,)),
    "Slice": Operator(slice_, (1, 2, 3, 4)),
    "Expand": Operator(expand, (1,)),
    "Tile": Operator(tile, (1,)),
    "Pad": Operator(pad, (1, 2, 3)),
    "ReduceMean": Operator(reduce_mean, (1,)),
    "ReduceSum": Operator(reduce_sum, (1,)),
    "ReduceMax": Operator(reduce_max, (1,)),
    "ReduceMin": Operator(reduce_min, (1,)),
    "ReduceL2": Operator(reduce_l2, (1,)),
    "Resize": Operator(resize, (1, 2, 3)),
}

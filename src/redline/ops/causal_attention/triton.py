"""Causal attention with Triton kernels and a deterministic gradient, registered as a custom op for torch.compile.

PyTorch's fused attention adds the contributions to a query's gradient in the order in which its programs finish, or
serializes the programs in deterministic mode. Here a separate kernel recomputes the scores and computes the gradients
of queries. This takes seven matrix multiplications instead of five, but no program waits for another.

T: tokens of all sequences, H: query heads, G: key and value heads, D: head dimension.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from redline.ops import kernel
from redline.ops.causal_attention import triton_kernels as kernels
from redline.ops.causal_attention.reference import Far

HEAD_DIMS = (16, 32, 64, 128)

_DOTS_ROWS = 128


@dataclass(frozen=True)
class Tiles:
    """Queries and keys per tile, warps, pipeline stages, and the shared memory in KiB that a program needs."""

    queries: int
    keys: int
    warps: int
    stages: int
    kib: int


# Looked up by kernel, element size in bytes and head dimension. The first tiles of an entry that fit the shared memory
# are used: the first are the fastest on an H200, the second are for GPUs with less shared memory.
TILES = {
    ("forward", 2, 64): (Tiles(128, 64, 8, 3, 80),),
    ("forward", 2, 128): (Tiles(64, 64, 4, 3, 120), Tiles(64, 64, 4, 2, 96)),
    ("queries", 2, 64): (Tiles(64, 64, 4, 3, 96),),
    ("queries", 2, 128): (Tiles(128, 64, 8, 3, 176), Tiles(64, 64, 8, 2, 96)),
    ("keys", 2, 64): (Tiles(128, 64, 4, 2, 96),),
    ("keys", 2, 128): (Tiles(64, 128, 8, 3, 176), Tiles(64, 64, 8, 2, 96)),
}
_SMALL = Tiles(32, 32, 4, 2, 99)


def causal_attention(q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, lowest_T: Tensor, far: Far | None = None) -> Tensor:
    """Computes the same as the reference. Softmax and accumulation are fp32."""
    if far is None:
        return _forward(q_THD, k_TGD, v_TGD, lowest_T)[0]
    # The kernels multiply the sum of product and bias by the scale, so the bias is divided by the scale beforehand.
    bias_T = far.bias_T.float() * q_THD.shape[-1] ** 0.5
    return _forward(q_THD, k_TGD, v_TGD, lowest_T, far.q_THD, far.k_TGD, bias_T, far.first_T)[0]


def why_not(like: Tensor, head_dim: int) -> str:
    if head_dim not in HEAD_DIMS:
        return f"unsupported head dimension {head_dim} (supported: {', '.join(map(str, HEAD_DIMS))})"
    return kernel.why_not(like)


def tiles_for(what: str, x: Tensor) -> Tiles:
    available = kernel.shared_bytes(x)
    choices = TILES.get((what, x.element_size(), max(64, x.shape[-1])), ())
    return next((tiles for tiles in choices if tiles.kib * 1024 <= available), _SMALL)


def _empty_outputs(q: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return kernel.empty_like(q), torch.empty((q.shape[1], q.shape[0]), dtype=torch.float32, device=q.device)


def _empty_grads(q: Tensor, k: Tensor, v: Tensor, lowest: Tensor, *others: Tensor | None) -> list[Tensor]:
    return [kernel.empty_like(x) for x in (q, k, v, *others[:3]) if x is not None]


@kernel.custom_op("causal_attention", _empty_outputs)
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lowest: Tensor,
    far_q: Tensor | None = None,
    far_k: Tensor | None = None,
    bias: Tensor | None = None,
    first: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the output, and the base-2 logarithm of the softmax's denominator for each head and token."""
    out, logs = _empty_outputs(q)
    q, k, v = (kernel.rows_contiguous(t) for t in (q, k, v))
    tokens, heads, dim = q.shape
    tiles = tiles_for("forward", q)
    far, far_strides = _far(far_q, far_k, bias, first)
    kernel.launch(
        kernels.causal_attention_forward_kernel,
        (-(-tokens // tiles.queries), heads),
        *(q, k, v, out, logs, lowest.contiguous(), *far, tokens, dim**-0.5 / math.log(2)),
        *(*_strides(q, k, v), *far_strides),
        **_constants(q, k, tiles),
    )
    return out, logs


@kernel.custom_op("causal_attention_backward", _empty_grads)
def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lowest: Tensor,
    far_q: Tensor | None,
    far_k: Tensor | None,
    bias: Tensor | None,
    first: Tensor | None,
    out: Tensor,
    logs: Tensor,
    grad: Tensor,
) -> list[Tensor]:
    """Returns the gradients of q, k and v and, if far keys are given, of the far queries, far keys and bias."""
    grad_q, grad_k, grad_v, *far_grads = grads = _empty_grads(q, k, v, lowest, far_q, far_k, bias)
    q, k, v, grad = (kernel.rows_contiguous(t) for t in (q, k, v, grad))
    (tokens, heads, dim), groups = q.shape, k.shape[1]
    lowest = lowest.contiguous()
    far, far_strides = _far(far_q, far_k, bias, first)
    grad_far_q, grad_far_k, grad_bias = far_grads or (None, None, None)
    # Each program writes the bias gradient of one group of heads. The groups are added later in a fixed order.
    group_grad_bias = None if grad_bias is None else torch.empty((groups, tokens), dtype=torch.float32, device=q.device)
    dots = torch.empty_like(logs)
    of_dots = (out, grad, dots, tokens, *_strides(grad))
    grid = (-(-tokens // _DOTS_ROWS), heads)
    kernel.launch(kernels.causal_attention_dots_kernel, grid, *of_dots, HEADS=heads, D=dim, M=_DOTS_ROWS, num_warps=4)
    sizes = (tokens, dim**-0.5 / math.log(2), dim**-0.5, *_strides(q, k, v, grad), *far_strides)
    tiles = tiles_for("keys", q)
    ends = (None if far[3] is None else _last_to_see(far[3]), grad_far_k, group_grad_bias)
    kernel.launch(
        kernels.causal_attention_keys_kernel,
        (-(-tokens // tiles.keys), groups),
        *(q, k, v, grad, logs, dots, grad_k, grad_v, lowest, _last_to_see(lowest), *far, *ends, *sizes),
        **_constants(q, k, tiles),
    )
    tiles = tiles_for("queries", q)
    kernel.launch(
        kernels.causal_attention_queries_kernel,
        (-(-tokens // tiles.queries), heads),
        *(q, k, v, grad, logs, dots, grad_q, lowest, *far, grad_far_q, *sizes),
        **_constants(q, k, tiles),
    )
    if group_grad_bias is not None:
        torch.sum(group_grad_bias, 0, out=grad_bias)
    return grads


def _differentiate(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    grad_q, grad_k, grad_v, *far = _backward(*ctx.saved_tensors, grad)
    return grad_q, grad_k, grad_v, None, *far


kernel.differentiate(_forward, _differentiate, saved=lambda inputs, output: (*inputs, *output))


def _constants(q: Tensor, k: Tensor, tiles: Tiles) -> dict[str, object]:
    heads, dim = q.shape[1:]
    sizes: dict[str, object] = {"HEADS": heads, "SHARED": heads // k.shape[1], "D": dim}
    sizes |= {"M": tiles.queries, "N": tiles.keys, "PRECISION": kernel.dot_precision(q.dtype)}
    return sizes | {"num_warps": tiles.warps, "num_stages": tiles.stages}


def _far(
    q: Tensor | None, k: Tensor | None, bias: Tensor | None, first: Tensor | None
) -> tuple[tuple[Tensor | None, ...], tuple[int, ...]]:
    """Returns the kernel arguments for the far keys, and their strides; None and 0 if there are none."""
    if q is None or k is None or bias is None or first is None:
        return (None, None, None, None), (0, 0, 0, 0)
    q, k = kernel.rows_contiguous(q), kernel.rows_contiguous(k)
    return (q, k, bias.contiguous(), first.contiguous()), _strides(q, k)


def _last_to_see(first: Tensor) -> Tensor:
    """Returns, for each token, the last token that sees it.

    Since `first` does not decrease, every token from a given token up to this last one sees the given token.
    """
    index = torch.arange(len(first), dtype=first.dtype, device=first.device)
    return torch.searchsorted(first, index, right=True, out_int32=True) - 1


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(stride for tensor in tensors for stride in tensor.stride()[:2])

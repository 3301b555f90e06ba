"""Computes linear cross-entropy in chunks of rows: the logits of a chunk are overwritten by their gradient.

Each chunk needs three cuBLAS matrix multiplications (logits, gradient of the rows, gradient of the weight) with Triton
kernels between them. cuBLAS is slow if the number of classes is not a multiple of 8 (50,257 in GPT-2), so the weight is
padded with zero rows, whose logits and gradients are zero. The weight's gradient is summed over chunks in fp32, because
bf16 would round it once per chunk and lose small contributions. A single chunk needs no sum and is rounded directly.

N: rows, D: features, V: classes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from redline.ops.cross_entropy.triton import write_gradient, write_loss

# The logits of a chunk take at most `CHUNK_BYTES`, and only half of that if half is enough for `CHUNK_ROWS` rows.
# Chunks should have many rows, because each chunk reads and writes the whole gradient of the weight once.
CHUNK_BYTES = 2**31
CHUNK_ROWS = 8192
# The dtype in which the weight's gradient is summed over chunks. The benchmark compares several.
SUM_DTYPE = torch.float32
# The rows of a chunk and the row stride of its logits are multiples of this, for full tiles and wide loads.
_ALIGNMENT = 128
# The fast kernels of cuBLAS need dimensions that are multiples of this.
_EVEN = 8


# The options of the loss: `ignore_index`, `label_smoothing` and `z_loss`.
Options = tuple[int, float, float]


def rows_of_a_chunk(rows: int, classes: int, element_bytes: int) -> int:
    """Returns the number of rows per chunk for as few chunks of equal size as the memory limit allows."""
    most = CHUNK_BYTES // (_up(classes) * element_bytes)
    most = max(_ALIGNMENT, max(min(most, CHUNK_ROWS), most // 2) // _ALIGNMENT * _ALIGNMENT)
    return _up(-(-rows // -(-rows // most)))


def sum_dtype(rows: int, classes: int, dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of the weight's gradient before it is scaled: not fp16, whose range is too small for it."""
    is_one_chunk = rows <= rows_of_a_chunk(rows, classes, dtype.itemsize)
    return dtype if is_one_chunk and dtype != torch.float16 else SUM_DTYPE


def empty_gradients(hidden_ND: Tensor, filled: int, classes: int, wanted: Sequence[bool]) -> tuple[Tensor, ...]:
    """Returns uninitialized gradients of hidden, weight (padded to `filled` rows) and bias; empty if not wanted."""
    (rows, features), dtype, device = hidden_ND.shape, hidden_ND.dtype, hidden_ND.device
    grad_hidden = torch.empty((rows if wanted[0] else 0, features), dtype=dtype, device=device)
    total = sum_dtype(rows, classes, dtype)
    grad_weight = torch.empty((filled if wanted[1] else 0, features), dtype=total, device=device)
    return grad_hidden, grad_weight, torch.empty((classes if wanted[2] else 0,), dtype=torch.float32, device=device)


def compute(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    target_N: Tensor,
    grad_N: Tensor | None,
    options: Options,
    wanted: Sequence[bool] = (False, False, False),
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes losses and, if the gradient of each row's loss is given, the gradients of hidden, weight and bias.

    Gradients that are not wanted are empty. The weight's gradient is in `sum_dtype`, that of the bias in fp32.
    """
    rows, classes = len(hidden_ND), len(weight_VD)
    device, dtype = hidden_ND.device, hidden_ND.dtype
    step = rows_of_a_chunk(rows, classes, hidden_ND.element_size())
    logits = torch.empty((min(step, rows), _up(classes)), dtype=dtype, device=device)
    filled = classes if classes % _EVEN == 0 else _up(classes)
    if filled > classes:
        weight_VD = F.pad(weight_VD, (0, 0, 0, filled - classes))
        bias_V = None if bias_V is None else F.pad(bias_V, (0, filled - classes))
    loss_N = torch.empty((rows,), dtype=torch.float32, device=device)
    grad_hidden, grad_weight, grad_bias = empty_gradients(hidden_ND, filled, classes, wanted)
    grad_bias.zero_()
    lse_N = torch.empty_like(loss_N)
    for first in range(0, rows, step):
        chunk = slice(first, first + step)
        product = logits[: rows - first, :filled]
        part = product[:, :classes]
        if bias_V is None:
            torch.mm(hidden_ND[chunk], weight_VD.t(), out=product)
        else:
            torch.addmm(bias_V, hidden_ND[chunk], weight_VD.t(), out=product)
        write_loss(part, target_N[chunk], loss_N[chunk], lse_N[chunk], *options)
        if grad_N is None:
            continue
        write_gradient(part, target_N[chunk], lse_N[chunk], grad_N[chunk], part, *options)
        if wanted[0]:
            torch.mm(product, weight_VD, out=grad_hidden[chunk])
        if wanted[1]:
            _add_product(grad_weight, product.t(), hidden_ND[chunk], first == 0)
        if wanted[2]:
            grad_bias.add_(part.sum(0, dtype=torch.float32))
    return loss_N, grad_hidden, grad_weight[:classes], grad_bias


def _add_product(total: Tensor, one: Tensor, other: Tensor, is_first: bool) -> None:
    """Adds one · other to the total without rounding the product first. If `is_first`, overwrites the total."""
    if one.dtype != total.dtype and one.is_cuda:
        if is_first:
            torch.mm(one, other, out_dtype=total.dtype, out=total)
        else:
            torch.addmm(total, one, other, out_dtype=total.dtype, out=total)
        return
    one, other = one.to(total.dtype), other.to(total.dtype)
    if is_first:
        torch.mm(one, other, out=total)
    else:
        total.addmm_(one, other)


def _up(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT

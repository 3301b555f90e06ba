"""Linear cross-entropy with chunked logits, registered as custom ops for torch.compile.

With reductions `mean` and `sum`, the gradient of every row's loss is the same number, which is known only in backward.
Forward computes the gradients while the logits exist, as if the gradient of the loss were 1. Backward multiplies them
by the actual gradient, which is read on the device and nearly always 1, so that this multiplication rounds nothing. The
number of rows that are not ignored is never copied to the host. In fp16, gradients times 1 / rows could underflow, so
forward uses a gradient of 1 for each row, and backward also applies the factor 1 / rows. With reduction `none` each row
has its own gradient, which is needed before the weight's gradient is summed over rows, so backward recomputes the
logits.

N: rows, D: features, V: classes.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch._C._autograd import _get_current_graph_task_keep_graph

from redline.ops import kernel
from redline.ops.cross_entropy.reference import counted
from redline.ops.kernel import why_not as why_not
from redline.ops.linear_cross_entropy.chunks import compute, empty_gradients

_SCALE_BLOCK = 2048


@triton.jit
def scale_kernel(source, factor, out, count, BLOCK: tl.constexpr):
    """Computes out = source · factor, where the factor is one element on the device."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    value = tl.load(source + index, mask=inside).to(tl.float32) * tl.load(factor)
    tl.store(out + index, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def scale_in_place_kernel(values, factor, count, BLOCK: tl.constexpr):
    """Multiplies the values by the factor in place. If the factor is 1, no value is read or written."""
    scale = tl.load(factor)
    if scale != 1.0:
        index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = index < count
        value = tl.load(values + index, mask=inside).to(tl.float32) * scale
        tl.store(values + index, value.to(values.dtype.element_ty), mask=inside)


def linear_cross_entropy(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    target_N: Tensor,
    bias_V: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    inputs = (hidden_ND, weight_VD, bias_V, target_N, ignore_index, label_smoothing, z_loss)
    if reduction == "none":
        return _rows(*inputs)
    trained = [
        tensor is not None and tensor.requires_grad and torch.is_grad_enabled()
        for tensor in (hidden_ND, weight_VD, bias_V)
    ]
    return _reduced(*inputs, reduction == "mean", trained)[0]


def _empty_outputs(hidden: Tensor, weight: Tensor, *others: Any) -> tuple[Tensor, ...]:
    loss, factor = (torch.empty((), dtype=torch.float32, device=hidden.device) for _ in range(2))
    return loss, factor, *empty_gradients(hidden, weight.shape[0], weight.shape[0], others[-1])


@kernel.custom_op("linear_cross_entropy", _empty_outputs)
def _reduced(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    smoothing: float,
    z_loss: float,
    is_mean: bool,
    trained: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns the loss, the factor that backward still has to apply to the gradients, and the gradients."""
    one = torch.ones((), dtype=torch.float32, device=hidden.device)
    share = one / counted(target, ignore_index) if is_mean else one.clone()
    now, later = (one, share.clone()) if hidden.dtype == torch.float16 else (share, one)
    grad = now.expand(len(hidden)).contiguous()
    inputs = (hidden.contiguous(), weight.contiguous(), bias, target.contiguous())
    options = (ignore_index, smoothing, z_loss)
    loss_N, grad_hidden, grad_weight, grad_bias = compute(*inputs, grad if any(trained) else None, options, trained)
    return loss_N.sum() * share, later, grad_hidden, grad_weight, grad_bias


def _scale_gradients(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    share, *gradients = ctx.saved_tensors
    found: list[Tensor | None] = [None] * 3
    if grad is not None:
        factor, dtype = grad * share, gradients[0].dtype
        for index, trained in enumerate(ctx.options[-1]):
            if trained and ctx.needs_input_grad[index]:
                gradient = gradients[index]
                if gradient.dtype == dtype and _is_last_use(gradient):
                    found[index] = _scale_in_place(gradient, factor)
                else:
                    found[index] = _scaled(gradient, factor, dtype)
    return tuple(found)


def _is_last_use(gradient: Tensor) -> bool:
    """Returns whether backward may overwrite the gradient: if the graph is not retained, and no compiler is tracing."""
    is_plain = type(gradient) is Tensor and not torch.compiler.is_compiling()
    return is_plain and not _get_current_graph_task_keep_graph()


def _scale_in_place(gradient: Tensor, factor: Tensor) -> Tensor:
    """Scales the gradient in place. If the factor is 1, the kernel reads only the factor."""
    count = gradient.numel()
    grid = (-(-count // _SCALE_BLOCK),)
    kernel.launch(scale_in_place_kernel, grid, gradient, factor.float(), count, BLOCK=_SCALE_BLOCK, num_warps=4)
    # Detached, because the saved tensor belongs to the graph of the forward pass.
    return gradient.detach()


kernel.differentiate(_reduced, _scale_gradients, saved=lambda inputs, output: output[1:], materialize=False)


def _empty_scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(gradient.shape, dtype=dtype, device=gradient.device)


@kernel.custom_op("linear_cross_entropy_scaled", _empty_scaled)
def _scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns gradient · factor, computed in fp32 and rounded once, without an fp32 copy."""
    out = _empty_scaled(gradient, factor, dtype)
    count = gradient.numel()
    blocks = -(-count // _SCALE_BLOCK)
    kernel.launch(scale_kernel, (blocks,), gradient, factor.float(), out, count, BLOCK=_SCALE_BLOCK, num_warps=4)
    return out


@kernel.custom_op(
    "linear_cross_entropy_rows",
    lambda hidden, *_: torch.empty((hidden.shape[0],), dtype=torch.float32, device=hidden.device),
)
def _rows(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    smoothing: float,
    z_loss: float,
) -> Tensor:
    inputs = (hidden.contiguous(), weight.contiguous(), bias, target.contiguous())
    return compute(*inputs, None, (ignore_index, smoothing, z_loss))[0]


@kernel.custom_op(
    "linear_cross_entropy_rows_backward",
    lambda hidden, weight, *others: empty_gradients(hidden, weight.shape[0], weight.shape[0], others[-1]),
)
def _rows_backward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    grad: Tensor,
    ignore_index: int,
    smoothing: float,
    z_loss: float,
    train: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    inputs = (hidden.contiguous(), weight.contiguous(), bias, target.contiguous())
    return compute(*inputs, grad.contiguous(), (ignore_index, smoothing, z_loss), train)[1:]


def _recompute_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    hidden, weight, bias, target = ctx.saved_tensors
    train = list(ctx.needs_input_grad[:3])
    gradients = _rows_backward(hidden, weight, bias, target, grad, *ctx.options, train)
    return tuple(one.to(hidden.dtype) if wanted else None for one, wanted in zip(gradients, train, strict=True))


kernel.differentiate(_rows, _recompute_gradients)

"""Linear cross-entropy with chunked logits, registered as custom ops for torch.compile.

With reductions `mean` and `sum`, the gradient of every row's loss is the same number, which is known only in backward.
Forward computes the gradients while the logits exist, as if the gradient of the loss were 1. Backward multiplies them
by the actual gradient, which is read on the device. It is nearly always 1, so this multiplication rounds nothing. The
number of rows that are not ignored is never copied to the host. In fp16, where 1 / rows would be too small, forward
uses a gradient of 1 for each row, and backward also applies the factor 1 / rows. With reduction `none` each row has its
own gradient, which is needed before the weight's gradient is summed over rows, so backward recomputes the logits.

N: rows, D: features, V: classes.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import _get_current_graph_task_keep_graph

from redline.ops.cross_entropy.reference import counted
from redline.ops.kernel import INTERPRETED, launch
from redline.ops.linear_cross_entropy.chunks import Options, Wanted, compute, sum_dtype
from redline.ops.linear_cross_entropy.triton_kernels import scale_in_place_kernel, scale_kernel

__all__ = ["INTERPRETED", "linear_cross_entropy"]

_SCALE_BLOCK = 2048


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
    """Computes the reference function."""
    inputs = (hidden_ND, weight_VD, bias_V, target_N, ignore_index, label_smoothing, z_loss)
    if reduction == "none":
        return _rows(*inputs)
    trained = [
        tensor is not None and tensor.requires_grad and torch.is_grad_enabled()
        for tensor in (hidden_ND, weight_VD, bias_V)
    ]
    return _reduced(*inputs, reduction == "mean", *trained)[0]


@torch.library.custom_op("redline::linear_cross_entropy", mutates_args=())
def _reduced(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    smoothing: float,
    z_loss: float,
    is_mean: bool,
    train_hidden: bool,
    train_weight: bool,
    train_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns the loss, the factor that backward still has to apply to the gradients, and the gradients."""
    options, wanted = Options(ignore_index, smoothing, z_loss), Wanted(train_hidden, train_weight, train_bias)
    one = torch.ones((), dtype=torch.float32, device=hidden.device)
    share = one / counted(target, ignore_index) if is_mean else one.clone()
    now, later = (one, share.clone()) if hidden.dtype == torch.float16 else (share, one)
    grad = now.expand(len(hidden)).contiguous()
    inputs = (hidden.contiguous(), weight.contiguous(), bias, target.contiguous())
    result = compute(*inputs, grad if train_hidden or train_weight or train_bias else None, options, wanted)
    return result.loss_N.sum() * share, later, result.hidden_ND, result.weight_VD, result.bias_V


@_reduced.register_fake
def _(hidden: Tensor, weight: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    loss = torch.empty((), dtype=torch.float32, device=hidden.device)
    return loss, torch.empty_like(loss), *_empty_gradients(hidden, weight, others[-3:])


def _empty_gradients(hidden: Tensor, weight: Tensor, wanted: Sequence[bool]) -> tuple[Tensor, Tensor, Tensor]:
    """Returns uninitialized gradients of hidden, weight and bias, with no rows where they are not wanted."""
    (rows, features), classes, device = hidden.shape, weight.shape[0], hidden.device
    grad_hidden = torch.empty((rows if wanted[0] else 0, features), dtype=hidden.dtype, device=device)
    dtype = sum_dtype(rows, classes, hidden.dtype)
    grad_weight = torch.empty((classes if wanted[1] else 0, features), dtype=dtype, device=device)
    return grad_hidden, grad_weight, torch.empty((classes if wanted[2] else 0,), dtype=torch.float32, device=device)


def _keep_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*output[1:])
    ctx.dtype = inputs[0].dtype
    ctx.trained = inputs[8:]
    ctx.set_materialize_grads(False)


def _scale_gradients(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    share, *gradients = ctx.saved_tensors
    found: list[Tensor | None] = [None] * 3
    if grad is not None:
        factor = grad * share
        for index, trained in enumerate(ctx.trained):
            if trained and ctx.needs_input_grad[index]:
                gradient = gradients[index]
                if gradient.dtype == ctx.dtype and _is_last_use(gradient):
                    found[index] = _scale_in_place(gradient, factor)
                else:
                    found[index] = _scaled(gradient, factor, ctx.dtype)
    return *found, *[None] * 8


def _is_last_use(gradient: Tensor) -> bool:
    """Returns whether backward may overwrite these gradients: it runs once, and no compiler is tracing."""
    is_plain = type(gradient) is Tensor and not torch.compiler.is_compiling()
    return is_plain and not _get_current_graph_task_keep_graph()


def _scale_in_place(gradient: Tensor, factor: Tensor) -> Tensor:
    """Scales the gradient in place. For a factor of 1 the kernel reads only the factor."""
    count = gradient.numel()
    grid = (-(-count // _SCALE_BLOCK),)
    launch(scale_in_place_kernel, grid, gradient, factor.float(), count, BLOCK=_SCALE_BLOCK, num_warps=4)
    # Detached, because the saved tensor belongs to the graph of the forward pass.
    return gradient.detach()


_reduced.register_autograd(_scale_gradients, setup_context=_keep_gradients)


@torch.library.custom_op("redline::linear_cross_entropy_scaled", mutates_args=())
def _scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns gradient · factor, computed in fp32 and rounded once, without an fp32 copy."""
    out = torch.empty(gradient.shape, dtype=dtype, device=gradient.device)
    count = gradient.numel()
    blocks = -(-count // _SCALE_BLOCK)
    launch(scale_kernel, (blocks,), gradient, factor.float(), out, count, BLOCK=_SCALE_BLOCK, num_warps=4)
    return out


@_scaled.register_fake
def _(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(gradient.shape, dtype=dtype, device=gradient.device)


@torch.library.custom_op("redline::linear_cross_entropy_rows", mutates_args=())
def _rows(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    smoothing: float,
    z_loss: float,
) -> Tensor:
    options, nothing = Options(ignore_index, smoothing, z_loss), Wanted(False, False, False)
    inputs = (hidden.contiguous(), weight.contiguous(), bias, target.contiguous())
    return compute(*inputs, None, options, nothing).loss_N


@_rows.register_fake
def _(hidden: Tensor, *_: object) -> Tensor:
    return torch.empty((hidden.shape[0],), dtype=torch.float32, device=hidden.device)


@torch.library.custom_op("redline::linear_cross_entropy_rows_backward", mutates_args=())
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
    options, wanted = Options(ignore_index, smoothing, z_loss), Wanted(*train)
    inputs = (hidden.contiguous(), weight.contiguous(), bias, target.contiguous())
    result = compute(*inputs, grad.contiguous(), options, wanted)
    return result.hidden_ND, result.weight_VD, result.bias_V


@_rows_backward.register_fake
def _(hidden: Tensor, weight: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_gradients(hidden, weight, others[-1])


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.options = inputs[4:]


def _recompute_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    hidden, weight, bias, target = ctx.saved_tensors
    train = list(ctx.needs_input_grad[:3])
    gradients = _rows_backward(hidden, weight, bias, target, grad, *ctx.options, train)
    found = [one.to(hidden.dtype) if wanted else None for one, wanted in zip(gradients, train, strict=True)]
    return *found, *[None] * 4


_rows.register_autograd(_recompute_gradients, setup_context=_keep_inputs)

"""LayerNorm, dropout and ReLU fused into one kernel."""

import torch
from torch import Tensor

from redline.errors import ModelError
from redline.ops.checks import check_floating, check_same_device, check_shape
from redline.ops.dispatch import run
from redline.ops.layer_norm_dropout_relu import reference


def layer_norm_dropout_relu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    p: float = 0.0,
    eps: float = 1e-5,
    training: bool = True,
    seed: int | Tensor | None = None,
    implementation: str = "auto",
) -> Tensor:
    """Returns relu(dropout(layer_norm(x))) over the last dimension, in x's dtype.

    Equal seeds (an integer, or an int64 tensor on x's device) drop the same elements. Without a seed, one is sampled
    from the default generator of the device, without synchronizing.
    """
    op = "layer_norm_dropout_relu"
    if x.ndim < 1:
        raise ModelError(f"{op}: x must have at least one dimension.")
    check_shape(op, "weight", weight, x.shape[-1:])
    check_shape(op, "bias", bias, x.shape[-1:])
    check_floating(op, x=x, weight=weight, bias=bias)
    check_same_device(op, x=x, weight=weight, bias=bias)
    if not 0 <= p < 1:
        raise ModelError(f"{op}: p must be at least 0 and less than 1, not {p}.")
    p = p if training else 0.0
    drawn = _seed(seed, x.device) if p else torch.zeros((), dtype=torch.int64, device=x.device)
    arguments = (x, weight, bias, p, eps, drawn)
    return run(op, implementation, (x,), reference.layer_norm_dropout_relu, *arguments)


def _seed(seed: int | Tensor | None, device: torch.device) -> Tensor:
    if seed is None:
        return torch.randint(2**63 - 1, (), dtype=torch.int64, device=device)
    if isinstance(seed, Tensor):
        if seed.numel() != 1 or seed.dtype != torch.int64 or seed.device != device:
            given = f"{tuple(seed.shape)} {seed.dtype} on {seed.device}"
            raise ModelError(
                f"layer_norm_dropout_relu: a seed tensor must be one int64 element on {device}, not {given}."
            )
        return seed.reshape(())
    if not 0 <= seed < 2**63:
        raise ModelError(f"layer_norm_dropout_relu: seed must be an integer from 0 to 2^63 - 1, not {seed}.")
    return torch.full((), seed, dtype=torch.int64, device=device)

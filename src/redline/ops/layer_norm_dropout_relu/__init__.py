"""LayerNorm, dropout and ReLU in one pass; `reference.py` is its specification, `triton.py` is faster."""

import torch
from torch import Tensor

from redline.errors import ModelError
from redline.ops.dispatch import choose
from redline.ops.layer_norm_dropout_relu import reference

__all__ = ["layer_norm_dropout_relu"]


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
    """relu(dropout(layer_norm(x))) over the last dimension, in x's dtype.

    The same seed (a number, or an int64 tensor on x's device) drops the same elements; without one, torch's generator
    of the device gives it, and the host does not wait.
    """
    _check(x, weight, bias, p)
    p = p if training else 0.0
    drawn = _seed(seed, x.device) if p else torch.zeros((), dtype=torch.int64, device=x.device)

    def why_not() -> str:
        from redline.ops.layer_norm_dropout_relu import triton

        return triton.why_not(x)

    if choose("layer_norm_dropout_relu", implementation, x.device, why_not) == "triton":
        from redline.ops.layer_norm_dropout_relu import triton

        return triton.layer_norm_dropout_relu(x, weight, bias, p, eps, drawn)
    return reference.layer_norm_dropout_relu(x, weight, bias, p, eps, drawn)


def _seed(seed: int | Tensor | None, device: torch.device) -> Tensor:
    if seed is None:
        return torch.randint(2**63 - 1, (), dtype=torch.int64, device=device)
    if isinstance(seed, Tensor):
        if seed.numel() != 1 or seed.dtype != torch.int64 or seed.device != device:
            given = f"{tuple(seed.shape)} in {seed.dtype} on {seed.device}"
            raise ModelError(f"a seed for dropout is one int64 number on {device}, not {given}.")
        return seed.reshape(())
    if not 0 <= seed < 2**63:
        raise ModelError(f"a seed for dropout is a whole number from 0 to 2^63 - 1, not {seed}.")
    return torch.full((), seed, dtype=torch.int64, device=device)


def _check(x: Tensor, weight: Tensor, bias: Tensor, p: float) -> None:
    if x.ndim < 1 or weight.ndim != 1 or weight.shape != bias.shape or x.shape[-1] != weight.shape[0]:
        shapes = f"{tuple(x.shape)}, {tuple(weight.shape)} and {tuple(bias.shape)}"
        raise ModelError(f"LayerNorm takes a weight and a bias for each number of the last dimension, not {shapes}.")
    if not all(tensor.is_floating_point() for tensor in (x, weight, bias)):
        raise ModelError(f"LayerNorm takes floating-point numbers, not {x.dtype}, {weight.dtype} and {bias.dtype}.")
    if weight.device != x.device or bias.device != x.device:
        raise ModelError(f"LayerNorm's input is on {x.device}, but not its weight and bias.")
    if not 0 <= p < 1:
        raise ModelError(f"the share that dropout drops is from 0 to less than 1, not {p}.")

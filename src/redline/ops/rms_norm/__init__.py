"""RMSNorm, alone or after a residual is added; `reference.py` is its specification, `triton.py` is faster."""

from torch import Tensor

from redline.errors import ModelError
from redline.ops.dispatch import choose
from redline.ops.rms_norm import reference

__all__ = ["add_rms_norm", "rms_norm"]


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6, implementation: str = "auto") -> Tensor:
    """x / √(mean(x²) + eps) · weight over the last dimension, in x's dtype."""
    _check(x, weight)
    if _choose(implementation, x) == "triton":
        from redline.ops.rms_norm import triton

        return triton.rms_norm(x, weight, eps)
    return reference.rms_norm(x, weight, eps)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, implementation: str = "auto"
) -> tuple[Tensor, Tensor]:
    """The norm of x + residual, and that sum, which the next layer adds to."""
    _check(x, weight)
    if residual.shape != x.shape or residual.dtype != x.dtype or residual.device != x.device:
        pair = f"{_described(x)} and {_described(residual)}"
        raise ModelError(f"RMSNorm adds a residual of the same shape, dtype and device, not {pair}.")
    if _choose(implementation, x) == "triton":
        from redline.ops.rms_norm import triton

        return triton.add_rms_norm(x, residual, weight, eps)
    return reference.add_rms_norm(x, residual, weight, eps)


def _choose(asked: str, x: Tensor) -> str:
    def why_not() -> str:
        from redline.ops.rms_norm import triton

        return triton.why_not(x)

    return choose("RMSNorm", asked, x.device, why_not)


def _check(x: Tensor, weight: Tensor) -> None:
    if x.ndim < 1 or weight.ndim != 1 or x.shape[-1] != weight.shape[0]:
        shapes = f"{tuple(x.shape)} and {tuple(weight.shape)}"
        raise ModelError(f"RMSNorm takes a weight for each number of the last dimension, not {shapes}.")
    if not x.is_floating_point() or not weight.is_floating_point():
        raise ModelError(f"RMSNorm takes floating-point numbers, not {x.dtype} and {weight.dtype}.")
    if x.device != weight.device:
        raise ModelError(f"RMSNorm's weight is on {weight.device}, but its input is on {x.device}.")


def _described(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} in {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"

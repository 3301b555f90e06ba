"""RMSNorm, alone or fused with the residual addition before it."""

from torch import Tensor

from redline.errors import ModelError
from redline.ops.checks import check_floating, check_same_device, check_same_dtype, check_shape
from redline.ops.dispatch import run
from redline.ops.rms_norm import reference


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6, implementation: str = "auto") -> Tensor:
    """Returns x / √(mean(x²) + eps) · weight over the last dimension, in x's dtype."""
    _check("rms_norm", x, weight)
    return run("rms_norm", implementation, (x,), reference.rms_norm, x, weight, eps)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, implementation: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Returns RMSNorm(x + residual), and the sum x + residual, which is the next layer's residual."""
    _check("add_rms_norm", x, weight)
    check_shape("add_rms_norm", "residual", residual, x.shape)
    check_same_dtype("add_rms_norm", x=x, residual=residual)
    check_same_device("add_rms_norm", x=x, residual=residual)
    return run("add_rms_norm", implementation, (x,), reference.add_rms_norm, x, residual, weight, eps)


def _check(op: str, x: Tensor, weight: Tensor) -> None:
    if x.ndim < 1:
        raise ModelError(f"{op}: x must have at least one dimension.")
    check_shape(op, "weight", weight, x.shape[-1:])
    check_floating(op, x=x, weight=weight)
    check_same_device(op, x=x, weight=weight)

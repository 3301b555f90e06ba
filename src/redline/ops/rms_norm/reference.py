"""Reference of RMSNorm over the last dimension, alone or after adding a residual.

The statistics and the product with the weight are fp32 (fp64 for fp64 input), and the result is rounded once to x's
dtype. Llama's code also rounds before the product: both agree in fp32, and this function is more accurate in bf16.
"""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (normed * weight.to(wide.dtype)).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Rounds the sum to x's dtype, as it is returned, and normalizes the rounded sum."""
    total = x + residual
    return rms_norm(total, weight, eps), total

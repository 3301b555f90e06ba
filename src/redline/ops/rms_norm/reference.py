"""Root-mean-square normalisation of the last dimension, and the same after a residual is added: the specification.

Statistics and the product with the weight are fp32 (fp64 for fp64 input) and the result is rounded once, to x's dtype.
Llama's own code rounds before the product as well: in fp32 the two agree, in bf16 this one is nearer to the truth.
"""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (normed * weight.to(wide.dtype)).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """What is normalised is the sum as it is stored, rounded to x's dtype."""
    total = x + residual
    return rms_norm(total, weight, eps), total

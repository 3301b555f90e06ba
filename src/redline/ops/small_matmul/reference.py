"""A linear layer for a few rows, in plain PyTorch (on a GPU, cuBLAS): the specification.

Shapes: M rows of K features, N outputs.
"""

from torch import Tensor
from torch.nn import functional as F


def small_matmul(x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """x · wᵀ + bias, in the dtype of x."""
    return F.linear(x_MK, w_NK, bias_N)

"""Reference of a linear layer followed by cross-entropy. It stores all logits.

N: rows, D: features, V: classes.
"""

from torch import Tensor
from torch.nn import functional as F

from redline.ops.cross_entropy.reference import cross_entropy


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
    """Returns the cross-entropy of hidden · weightᵀ + bias in fp32 (fp64 for fp64 inputs)."""
    logits_NV = F.linear(hidden_ND, weight_VD, bias_V)
    return cross_entropy(logits_NV, target_N, ignore_index, label_smoothing, z_loss, reduction)

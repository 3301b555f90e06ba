"""Reference of softmax attention of each token over a span of tokens that ends with itself.

T: tokens of all sequences, H: query heads, G: key and value heads, D: head dimension.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Far(NamedTuple):
    """Separate queries and keys for the tokens before each query's span. The values are the same as inside the span.

    Token t sees the far keys from `first_T[t]` to `lowest_T[t] - 1`. `bias_T` is added to the scores of each key.
    `first_T` must not decrease from one token to the next, and must not exceed `lowest_T`.
    """

    q_THD: Tensor
    k_TGD: Tensor
    bias_T: Tensor
    first_T: Tensor


def causal_attention(q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, lowest_T: Tensor, far: Far | None = None) -> Tensor:
    """Returns (T, H, D). The softmax is computed in fp32 or higher, and all T × T scores are stored."""
    scores_HTT = _scores(q_THD, k_TGD)
    index = torch.arange(len(q_THD), device=q_THD.device)
    sees_TT = (index <= index[:, None]) & (index >= lowest_T[:, None])
    far_scores_HTT = torch.full_like(scores_HTT, -torch.inf)
    if far is not None:
        far_TT = (index < lowest_T[:, None]) & (index >= far.first_T[:, None])
        far_scores_HTT = (_scores(far.q_THD, far.k_TGD) + far.bias_T).masked_fill(~far_TT, -torch.inf)
    weights_HTT = torch.where(sees_TT, scores_HTT, far_scores_HTT).softmax(-1)
    return torch.einsum("hts,shd->thd", weights_HTT.to(v_TGD.dtype), _repeated(v_TGD, len(weights_HTT)))


def _scores(q_THD: Tensor, k_TGD: Tensor) -> Tensor:
    number = torch.promote_types(q_THD.dtype, torch.float32)
    scores_HTT = torch.einsum("thd,shd->hts", q_THD, _repeated(k_TGD, q_THD.shape[1]))
    return scores_HTT.to(number) * q_THD.shape[-1] ** -0.5


def _repeated(x_TGD: Tensor, heads: int) -> Tensor:
    return x_TGD.repeat_interleave(heads // x_TGD.shape[1], 1)

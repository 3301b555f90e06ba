"""Softmax attention of each token to a stretch of tokens that ends with itself, written out."""

import torch
from torch import Tensor


def causal_attention(q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, lowest_T: Tensor) -> Tensor:
    """(T, H, D); softmax is fp32 at the least, and every score is held."""
    tokens, heads, dim = q_THD.shape
    shared = heads // k_TGD.shape[1]
    number = torch.promote_types(q_THD.dtype, torch.float32)
    k_THD, v_THD = (t.repeat_interleave(shared, 1) for t in (k_TGD, v_TGD))
    scores_HTT = torch.einsum("thd,shd->hts", q_THD, k_THD).to(number) * dim**-0.5
    index = torch.arange(tokens, device=q_THD.device)
    sees_TT = (index <= index[:, None]) & (index >= lowest_T[:, None])
    shares_HTT = scores_HTT.masked_fill(~sees_TT, -torch.inf).softmax(-1)
    return torch.einsum("hts,shd->thd", shares_HTT.to(v_THD.dtype), v_THD)

"""The gated delta rule, a memory of constant size that any length of text is written to and read from.

`reference.py` is its specification; the Triton kernels take long sequences on a GPU.
"""

from functools import partial

import torch
from torch import Tensor

from redline.errors import ModelError
from redline.ops.dispatch import choose
from redline.ops.gated_delta_rule import reference
from redline.ops.gated_delta_rule.reference import gated_delta_step

__all__ = ["gated_delta_rule", "gated_delta_step"]


def gated_delta_rule(
    q_BSHK: Tensor,
    k_BSHK: Tensor,
    v_BSHV: Tensor,
    g_BSH: Tensor,
    beta_BSH: Tensor,
    state_BHKV: Tensor | None = None,
    documents_BS: Tensor | None = None,
    chunk: int = 64,
    implementation: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Outputs (B, S, H, V) in the dtype of v, and the state after the last token, fp32 (fp64 for fp64).

    q and k are normalised and scaled by the caller; g ≤ 0 is the logarithm of what is kept from token to token, and
    beta in 0…1 how far a token corrects what its key holds. `documents_BS` numbers the document of each token, never
    decreasing: the state is empty again at each document's first token. A given state belongs to the document of the
    first token, so that what one call ends with, the next can begin with. `chunk` changes speed and rounding alone.
    The kernels multiply in the widest dtype of q, k and v: for speed, all three come in bf16 or fp16.
    """
    _check(q_BSHK, k_BSHK, v_BSHV, g_BSH, beta_BSH, state_BHKV, documents_BS, chunk)
    tensors = (q_BSHK, k_BSHK, v_BSHV, g_BSH, beta_BSH, state_BHKV, documents_BS)
    why_not = partial(_why_not_triton, q_BSHK, k_BSHK, v_BSHV, chunk)
    if choose("gated_delta_rule", implementation, q_BSHK.device, why_not) == "triton":
        # Imported late: Triton takes a while, and only GPUs need it.
        from redline.ops.gated_delta_rule import triton

        return triton.gated_delta_rule(*tensors, chunk=chunk)
    if q_BSHK.shape[1] == 1:  # a decoder's token: the definition has fewer operations
        return reference.recurrent(*tensors)
    return reference.chunked(*tensors, chunk=chunk)


def _why_not_triton(q_BSHK: Tensor, k_BSHK: Tensor, v_BSHV: Tensor, chunk: int) -> str:
    from redline.ops.gated_delta_rule import triton

    return triton.why_not(q_BSHK, k_BSHK, v_BSHV, chunk)


def _check(
    q_BSHK: Tensor,
    k_BSHK: Tensor,
    v_BSHV: Tensor,
    g_BSH: Tensor,
    beta_BSH: Tensor,
    state_BHKV: Tensor | None,
    documents_BS: Tensor | None,
    chunk: int,
) -> None:
    if q_BSHK.ndim != 4 or k_BSHK.shape != q_BSHK.shape or v_BSHV.ndim != 4 or v_BSHV.shape[:3] != q_BSHK.shape[:3]:
        shapes = f"{tuple(q_BSHK.shape)}, {tuple(k_BSHK.shape)} and {tuple(v_BSHV.shape)}"
        raise ModelError(f"the gated delta rule takes q and k (B, S, H, K) and v (B, S, H, V), not {shapes}.")
    batch, tokens, heads, keys = q_BSHK.shape
    if not tokens:
        raise ModelError("the gated delta rule needs at least one token.")
    if g_BSH.shape != (batch, tokens, heads) or beta_BSH.shape != g_BSH.shape:
        shapes = f"{tuple(g_BSH.shape)} and {tuple(beta_BSH.shape)}"
        raise ModelError(f"the gated delta rule takes g and beta of {(batch, tokens, heads)} here, not {shapes}.")
    expected = (batch, heads, keys, v_BSHV.shape[-1])
    if state_BHKV is not None and state_BHKV.shape != expected:
        raise ModelError(f"a state of the gated delta rule is {expected} here, not {tuple(state_BHKV.shape)}.")
    if documents_BS is not None:
        if documents_BS.shape != (batch, tokens):
            raise ModelError(f"document numbers are {(batch, tokens)} here, not {tuple(documents_BS.shape)}.")
        if documents_BS.is_floating_point() or documents_BS.dtype == torch.bool:
            raise ModelError(f"document numbers are whole numbers, not {documents_BS.dtype}.")
    if chunk < 1:
        raise ModelError(f"a chunk holds at least 1 token, not {chunk}.")

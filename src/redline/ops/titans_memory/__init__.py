"""The Titans memory: gradient descent with momentum and forgetting, as a layer.

`reference.py` is its specification; the Triton kernels take long sequences on a GPU.
"""

from functools import partial

import torch
from torch import Tensor

from redline.errors import ModelError
from redline.ops.dispatch import choose
from redline.ops.titans_memory import reference
from redline.ops.titans_memory.reference import TitansState, titans_step

__all__ = ["TitansState", "titans_memory", "titans_step"]


def titans_memory(
    q_BSHK: Tensor,
    k_BSHK: Tensor,
    v_BSHV: Tensor,
    alpha_BSH: Tensor,
    eta_BSH: Tensor,
    theta_BSH: Tensor,
    state: TitansState | None = None,
    documents_BS: Tensor | None = None,
    chunk: int = 64,
    implementation: str = "auto",
) -> tuple[Tensor, TitansState]:
    """Outputs (B, S, H, V) in the dtype of v, and the state after the last token, fp32 (fp64 for fp64).

    q and k are normalised and scaled by the caller; alpha in 0…1 is what a token forgets, eta in 0…1 what it keeps of
    the momentum, theta ≥ 0 its step. The gradient is taken at the memory at the start of a chunk, so `chunk` is part of
    the model. `documents_BS` numbers the document of each token, never decreasing: the state is empty and a new chunk
    begins at each document's first token. A given state belongs to the document of the first token; cut anywhere, a
    text carried on gives what it gives whole. The kernels multiply in the widest dtype of q, k and v.
    """
    _check(q_BSHK, k_BSHK, v_BSHV, (alpha_BSH, eta_BSH, theta_BSH), state, documents_BS, chunk)
    inputs = (q_BSHK, k_BSHK, v_BSHV, alpha_BSH, eta_BSH, theta_BSH, state, documents_BS, chunk)
    why_not = partial(_why_not_triton, q_BSHK, k_BSHK, v_BSHV, chunk)
    if choose("titans_memory", implementation, q_BSHK.device, why_not) == "triton":
        # Imported late: Triton takes a while, and only GPUs need it.
        from redline.ops.titans_memory import triton

        return triton.titans_memory(*inputs)
    return reference.chunked(*inputs)


def _why_not_triton(q_BSHK: Tensor, k_BSHK: Tensor, v_BSHV: Tensor, chunk: int) -> str:
    from redline.ops.titans_memory import triton

    return triton.why_not(q_BSHK, k_BSHK, v_BSHV, chunk)


def _check(
    q_BSHK: Tensor,
    k_BSHK: Tensor,
    v_BSHV: Tensor,
    gates_BSH: tuple[Tensor, ...],
    state: TitansState | None,
    documents_BS: Tensor | None,
    chunk: int,
) -> None:
    if q_BSHK.ndim != 4 or k_BSHK.shape != q_BSHK.shape or v_BSHV.ndim != 4 or v_BSHV.shape[:3] != q_BSHK.shape[:3]:
        shapes = f"{tuple(q_BSHK.shape)}, {tuple(k_BSHK.shape)} and {tuple(v_BSHV.shape)}"
        raise ModelError(f"the Titans memory takes q and k (B, S, H, K) and v (B, S, H, V), not {shapes}.")
    batch, tokens, heads, keys = q_BSHK.shape
    if not tokens:
        raise ModelError("the Titans memory needs at least one token.")
    if any(gate.shape != (batch, tokens, heads) for gate in gates_BSH):
        shapes = ", ".join(str(tuple(gate.shape)) for gate in gates_BSH)
        raise ModelError(
            f"the Titans memory takes alpha, eta and theta of {(batch, tokens, heads)} here, not {shapes}."
        )
    expected = (batch, heads, keys, v_BSHV.shape[-1])
    if state is not None and (any(part.shape != expected for part in state[:3]) or state.position_B.shape != (batch,)):
        shapes = ", ".join(str(tuple(part.shape)) for part in state)
        raise ModelError(f"a state of the Titans memory is three times {expected} and {(batch,)} here, not {shapes}.")
    if documents_BS is not None:
        if documents_BS.shape != (batch, tokens):
            raise ModelError(f"document numbers are {(batch, tokens)} here, not {tuple(documents_BS.shape)}.")
        if documents_BS.is_floating_point() or documents_BS.dtype == torch.bool:
            raise ModelError(f"document numbers are whole numbers, not {documents_BS.dtype}.")
    if chunk < 1:
        raise ModelError(f"a chunk holds at least 1 token, not {chunk}.")

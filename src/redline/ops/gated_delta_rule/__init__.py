"""The gated delta rule: a recurrent memory of constant size for sequences of any length.

B: sequences, S: tokens, H: heads, K: channels of a key, V: channels of a value.
"""

from torch import Tensor

from redline.ops.checks import check_memory_inputs
from redline.ops.dispatch import kernels, select
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
    """Returns outputs (B, S, H, V) in the dtype of v, and the state after the last token in fp32 (fp64 for fp64).

    The caller normalizes and scales q and k. `g_BSH` ≤ 0 is the log decay of the state at each token, and `beta_BSH` in
    [0, 1] the strength of the token's correction. `documents_BS` holds the document index of each token and must not
    decrease; the state is reset to zero at each document's first token. A given state belongs to the document of the
    first token, so the state that one call returns can be passed to the next. `chunk` only affects speed and rounding.
    The kernels multiply in the widest dtype of q, k and v: for speed, pass all three in bf16 or fp16.
    """
    op = "gated_delta_rule"
    gates = {"g_BSH": g_BSH, "beta_BSH": beta_BSH}
    check_memory_inputs(op, q_BSHK, documents_BS, chunk, k_BSHK=k_BSHK, v_BSHV=v_BSHV, **gates, state_BHKV=state_BHKV)
    tensors = (q_BSHK, k_BSHK, v_BSHV, g_BSH, beta_BSH, state_BHKV, documents_BS)
    if select(op, implementation, q_BSHK, k_BSHK, v_BSHV, chunk) == "triton":
        return kernels(op).gated_delta_rule(*tensors, chunk=chunk)
    if q_BSHK.shape[1] == 1:  # decoding: the recurrent form has fewer operations
        return reference.recurrent(*tensors)
    return reference.chunked(*tensors, chunk=chunk)

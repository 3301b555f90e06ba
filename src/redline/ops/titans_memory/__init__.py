"""The Titans memory: a linear memory that is updated by gradient descent with momentum and weight decay.

`reference.py` is the specification in plain PyTorch; `triton.py` has chunked kernels.

B: sequences, S: tokens, H: heads, K: channels of a key, V: channels of a value.
"""

from torch import Tensor

from redline.ops.checks import check_memory_inputs, check_shape
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
    """Returns outputs (B, S, H, V) in the dtype of v, and the state after the last token in fp32 (fp64 for fp64).

    The caller normalizes and scales q and k. At each token the memory decays by 1 - alpha (alpha in [0, 1]) and the
    momentum by eta (in [0, 1]); theta ≥ 0 is the learning rate. The gradient is taken at the memory at the start of the
    chunk, so `chunk` is part of the model. `documents_BS` holds the document index of each token and must not decrease;
    at each document's first token the state is reset to zero and a new chunk starts. A given state belongs to the
    document of the first token, and a sequence may be cut anywhere: its parts give the result of the whole. The kernels
    multiply in the widest dtype of q, k and v.
    """
    op = "titans_memory"
    check_memory_inputs(op, q_BSHK, k_BSHK, v_BSHV, documents_BS, chunk)
    batch, tokens, heads, keys = q_BSHK.shape
    for name, gate in (("alpha_BSH", alpha_BSH), ("eta_BSH", eta_BSH), ("theta_BSH", theta_BSH)):
        check_shape(op, name, gate, (batch, tokens, heads))
    if state is not None:
        for name, matrix in zip(state._fields[:3], state[:3], strict=True):
            check_shape(op, f"state.{name}", matrix, (batch, heads, keys, v_BSHV.shape[-1]))
        check_shape(op, "state.position_B", state.position_B, (batch,))
    inputs = (q_BSHK, k_BSHK, v_BSHV, alpha_BSH, eta_BSH, theta_BSH, state, documents_BS, chunk)

    def why_not() -> str:
        return _triton().why_not(q_BSHK, k_BSHK, v_BSHV, chunk)

    if choose(op, implementation, q_BSHK.device, why_not) == "triton":
        return _triton().titans_memory(*inputs)
    return reference.chunked(*inputs)


def _triton():
    from redline.ops.titans_memory import triton  # imports Triton

    return triton

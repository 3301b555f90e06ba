"""The Titans memory: a linear memory that is updated by gradient descent with momentum and weight decay.

B: sequences, S: tokens, H: heads, K: channels of a key, V: channels of a value.
"""

from torch import Tensor

from redline.ops.checks import check_memory_inputs
from redline.ops.dispatch import run
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

    The caller normalizes and scales q and k. At each token the memory is multiplied by 1 - alpha (alpha in [0, 1]) and
    the momentum by eta (in [0, 1]); theta ≥ 0 is the learning rate. The gradient is taken at the memory at the start of
    the chunk, so `chunk` is part of the model. `documents_BS` holds the document index of each token and must not
    decrease; at each document's first token the state is reset to zero and a new chunk starts. A given state belongs to
    the document of the first token, so calls on consecutive parts of a sequence return the same as one call. The
    kernels multiply in the widest dtype of q, k and v.
    """
    op = "titans_memory"
    gates = {"alpha_BSH": alpha_BSH, "eta_BSH": eta_BSH, "theta_BSH": theta_BSH}
    states = {} if state is None else {f"state.{name}": tensor for name, tensor in state._asdict().items()}
    check_memory_inputs(op, q_BSHK, documents_BS, chunk, k_BSHK=k_BSHK, v_BSHV=v_BSHV, **gates, **states)
    inputs = (q_BSHK, k_BSHK, v_BSHV, alpha_BSH, eta_BSH, theta_BSH, state, documents_BS, chunk)
    return run(op, implementation, (q_BSHK, k_BSHK, v_BSHV, chunk), reference.chunked, *inputs)

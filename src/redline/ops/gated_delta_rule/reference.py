"""Reference of the gated delta rule: a linear memory with decay that corrects the value stored under a key.

    S_t = e^{g_t} S_{t−1} + β_t k_t (v_t − (e^{g_t} S_{t−1})ᵀ k_t)ᵀ          o_t = S_tᵀ q_t

`recurrent` is the definition, token by token. `chunked` computes the same by matrix products: inside a chunk the
corrections solve a unit lower triangular system, and only the state passes between chunks.

B: sequences, S: tokens, H: heads, K: channels of a key, V: channels of a value, N: chunks, C: tokens per chunk. A state
is (B, H, K, V). The state and all sums are fp32 (fp64 for fp64 inputs).
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def recurrent(
    q_BSHK: Tensor,
    k_BSHK: Tensor,
    v_BSHV: Tensor,
    g_BSH: Tensor,
    beta_BSH: Tensor,
    state_BHKV: Tensor | None = None,
    documents_BS: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes the definition, one token after the other."""
    state_BHKV = initial_state(k_BSHK, v_BSHV, state_BHKV)
    outputs = []
    for token in range(q_BSHK.shape[1]):
        if documents_BS is not None and token:
            other = documents_BS[:, token] != documents_BS[:, token - 1]
            state_BHKV = state_BHKV.masked_fill(other[:, None, None, None], 0)
        step = (q_BSHK[:, token], k_BSHK[:, token], v_BSHV[:, token], g_BSH[:, token], beta_BSH[:, token])
        o_BHV, state_BHKV = gated_delta_step(*step, state_BHKV)
        outputs.append(o_BHV)
    return torch.stack(outputs, 1), state_BHKV


def gated_delta_step(
    q_BHK: Tensor, k_BHK: Tensor, v_BHV: Tensor, g_BH: Tensor, beta_BH: Tensor, state_BHKV: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the output of one token in the dtype of v, and the state after it."""
    exact = state_BHKV.dtype
    q, k, v, g, beta = (tensor.to(exact) for tensor in (q_BHK, k_BHK, v_BHV, g_BH, beta_BH))
    state_BHKV = state_BHKV * g.exp()[..., None, None]
    # Elementwise products and sums instead of matmul, so that neither autocast nor TF32 rounds the state.
    held_BHV = (state_BHKV * k[..., None]).sum(-2)
    state_BHKV = state_BHKV + k[..., None] * (beta[..., None] * (v - held_BHV))[..., None, :]
    return (state_BHKV * q[..., None]).sum(-2).to(v_BHV.dtype), state_BHKV


def chunked(
    q_BSHK: Tensor,
    k_BSHK: Tensor,
    v_BSHV: Tensor,
    g_BSH: Tensor,
    beta_BSH: Tensor,
    state_BHKV: Tensor | None = None,
    documents_BS: Tensor | None = None,
    chunk: int = 64,
) -> tuple[Tensor, Tensor]:
    """Computes `recurrent` by matrix products. Padding tokens of the last chunk do not decay or change the state."""
    with torch.autocast(q_BSHK.device.type, enabled=False):
        S_BHKV = initial_state(k_BSHK, v_BSHV, state_BHKV)
        tokens = q_BSHK.shape[1]
        chunk = min(chunk, tokens)
        padding = -tokens % chunk
        q, k, v, g, beta = (
            _in_chunks(tensor.to(S_BHKV.dtype), chunk, padding) for tensor in (q_BSHK, k_BSHK, v_BSHV, g_BSH, beta_BSH)
        )
        log_decay_BHNC = g.cumsum(-1)
        same_BNCC, carried_BNC = _document_masks(documents_BS, tokens, chunk, padding, q_BSHK.device)
        decay_BHNCC = (log_decay_BHNC[..., :, None] - log_decay_BHNC[..., None, :]).masked_fill(~same_BNCC, -torch.inf)
        decay_BHNCC = decay_BHNCC.exp()
        from_start_BHNC = log_decay_BHNC.masked_fill(~carried_BNC, -torch.inf).exp()
        A_BHNCC = (beta[..., None] * (k @ k.mT) * decay_BHNCC).tril(-1)
        right = torch.cat((beta[..., None] * v, (beta * from_start_BHNC)[..., None] * k), -1)
        solved = torch.linalg.solve_triangular(A_BHNCC, right, upper=False, unitriangular=True)
        U_BHNCV, W_BHNCK = solved.split((v.shape[-1], k.shape[-1]), -1)
        scores_BHNCC = (q @ k.mT) * decay_BHNCC
        q_decayed, k_decayed = q * from_start_BHNC[..., None], k * decay_BHNCC[..., -1, :, None]
        outputs = []
        for n in range(q.shape[2]):
            corrections_BHCV = U_BHNCV[:, :, n] - W_BHNCK[:, :, n] @ S_BHKV
            outputs.append(q_decayed[:, :, n] @ S_BHKV + scores_BHNCC[:, :, n] @ corrections_BHCV)
            S_BHKV = from_start_BHNC[:, :, n, -1, None, None] * S_BHKV + k_decayed[:, :, n].mT @ corrections_BHCV
        o_BHSV = torch.cat(outputs, 2)[:, :, :tokens]
        return o_BHSV.transpose(1, 2).to(v_BSHV.dtype), S_BHKV


def initial_state(k_BSHK: Tensor, v_BSHV: Tensor, state_BHKV: Tensor | None) -> Tensor:
    """Returns the given state or zeros, in the dtype in which sums are computed."""
    exact = torch.float64 if v_BSHV.dtype == torch.float64 else torch.float32
    if state_BHKV is not None:
        return state_BHKV.to(exact)
    batch, _, heads, keys = k_BSHK.shape
    return torch.zeros((batch, heads, keys, v_BSHV.shape[-1]), dtype=exact, device=v_BSHV.device)


def _in_chunks(tensor_BSH: Tensor, chunk: int, padding: int) -> Tensor:
    """Returns (B, S, H, …) as (B, H, N, C, …), padded with zeros."""
    tensor_BHS = F.pad(tensor_BSH.transpose(1, 2), (0, 0) * (tensor_BSH.ndim - 3) + (0, padding))
    return tensor_BHS.unflatten(2, (-1, chunk))


def _document_masks(
    documents_BS: Tensor | None, tokens: int, chunk: int, padding: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Returns masks of causal pairs of tokens in one document, and of tokens that see the state before the chunk."""
    causal_CC = torch.ones((chunk, chunk), dtype=torch.bool, device=device).tril()
    if documents_BS is None:
        return causal_CC, torch.ones((1, chunk), dtype=torch.bool, device=device)
    # Padding tokens belong to the last document, so that its state passes through them.
    documents_BS = torch.cat((documents_BS, documents_BS[:, -1:].expand(-1, padding)), 1)
    documents_BNC = documents_BS.unflatten(1, (-1, chunk))[:, None]
    before_BN = torch.cat((documents_BNC[..., :1, 0], documents_BNC[..., :-1, -1]), -1)
    same_BNCC = (documents_BNC[..., :, None] == documents_BNC[..., None, :]) & causal_CC
    return same_BNCC, documents_BNC == before_BN[..., None]

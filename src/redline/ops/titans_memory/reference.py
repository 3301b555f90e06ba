"""Reference of the Titans update of a linear memory: gradient descent with momentum and weight decay.

    S_t = η_t S_{t−1} − θ_t k_t (M₀ᵀ k_t − v_t)ᵀ          M_t = (1 − α_t) M_{t−1} + S_t          o_t = M_tᵀ q_t

M₀ is the memory at the start of the token's chunk, where the gradient is taken, so chunks are part of the definition.
A chunk starts at each document's first token, so the result of a document does not depend on packing. The state
contains the position in the current chunk, so a sequence can be cut at any token and continued in another call.

`recurrent` is the definition, token by token; `chunked` computes the same by matrix products. `chunked` splits the
tokens of a call into blocks as long as a chunk, so a document's chunk may end inside a block. Tokens before that end
use the M₀ of the previous block, and tokens after it use the memory at that point. Tokens of documents that start
inside the block use an M₀ of zero, because no such document reaches its second chunk in the block.

B: sequences, S: tokens, H: heads, K: channels of a key, V: channels of a value, C: tokens per chunk. The state and all
sums are fp32 (fp64 for fp64 inputs).
"""

from typing import NamedTuple

import torch
from torch import Tensor


class TitansState(NamedTuple):
    """The state after a call, which the next call can start from. The batch is the first dimension of every tensor."""

    memory_BHKV: Tensor
    momentum_BHKV: Tensor
    anchor_BHKV: Tensor
    """The memory at the start of the chunk that the next token belongs to."""
    position_B: Tensor
    """The number of tokens of the current chunk that have been processed, int32."""


def initial_state(k_BSHK: Tensor, v_BSHV: Tensor, state: TitansState | None) -> TitansState:
    """Returns the given state or zeros, in the dtype in which sums are computed."""
    exact = torch.float64 if v_BSHV.dtype == torch.float64 else torch.float32
    if state is not None:
        memory, momentum, anchor = (matrix.to(exact) for matrix in state[:3])
        return TitansState(memory, momentum, anchor, state.position_B)
    batch, _, heads, keys = k_BSHK.shape
    empty = torch.zeros((batch, heads, keys, v_BSHV.shape[-1]), dtype=exact, device=v_BSHV.device)
    return TitansState(empty, empty, empty, torch.zeros(batch, dtype=torch.int32, device=v_BSHV.device))


def recurrent(
    q_BSHK: Tensor,
    k_BSHK: Tensor,
    v_BSHV: Tensor,
    alpha_BSH: Tensor,
    eta_BSH: Tensor,
    theta_BSH: Tensor,
    state: TitansState | None = None,
    documents_BS: Tensor | None = None,
    chunk: int = 64,
) -> tuple[Tensor, TitansState]:
    """Computes the definition, one token after the other."""
    state = initial_state(k_BSHK, v_BSHV, state)
    outputs = []
    for token in range(q_BSHK.shape[1]):
        if documents_BS is not None and token:
            other_B = documents_BS[:, token] != documents_BS[:, token - 1]
            other = other_B[:, None, None, None]
            memory, momentum, anchor = (matrix.masked_fill(other, 0) for matrix in state[:3])
            state = TitansState(memory, momentum, anchor, state.position_B.masked_fill(other_B, 0))
        step = (tensor[:, token] for tensor in (q_BSHK, k_BSHK, v_BSHV, alpha_BSH, eta_BSH, theta_BSH))
        o_BHV, state = titans_step(*step, state=state, chunk=chunk)
        outputs.append(o_BHV)
    return torch.stack(outputs, 1), state


def titans_step(
    q_BHK: Tensor,
    k_BHK: Tensor,
    v_BHV: Tensor,
    alpha_BH: Tensor,
    eta_BH: Tensor,
    theta_BH: Tensor,
    state: TitansState,
    chunk: int = 64,
) -> tuple[Tensor, TitansState]:
    """Returns the output of one token in the dtype of v, and the state after it."""
    exact = state.memory_BHKV.dtype
    tensors = (q_BHK, k_BHK, v_BHV, alpha_BH, eta_BH, theta_BH)
    q, k, v, alpha, eta, theta = (tensor.to(exact)[..., None] for tensor in tensors)
    # Elementwise products and sums instead of matmul, so that neither autocast nor TF32 rounds the state.
    error_BH1V = ((state.anchor_BHKV * k).sum(-2) - v[..., 0])[..., None, :]
    momentum = eta[..., None] * state.momentum_BHKV - theta[..., None] * k * error_BH1V
    memory = (1 - alpha[..., None]) * state.memory_BHKV + momentum
    position_B = (state.position_B + 1) % chunk
    anchor = torch.where((position_B == 0)[:, None, None, None], memory, state.anchor_BHKV)
    return (memory * q).sum(-2).to(v_BHV.dtype), TitansState(memory, momentum, anchor, position_B)


def chunked(
    q_BSHK: Tensor,
    k_BSHK: Tensor,
    v_BSHV: Tensor,
    alpha_BSH: Tensor,
    eta_BSH: Tensor,
    theta_BSH: Tensor,
    state: TitansState | None = None,
    documents_BS: Tensor | None = None,
    chunk: int = 64,
) -> tuple[Tensor, TitansState]:
    """Computes the same as `recurrent` with matrix products, block by block from the first token."""
    # Without state and documents, blocks coincide with chunks, which saves half of the work.
    aligned = state is None and documents_BS is None
    memory, momentum, anchor, position_B = initial_state(k_BSHK, v_BSHV, state)
    with torch.autocast(q_BSHK.device.type, enabled=False):
        tensors = (q_BSHK, k_BSHK, v_BSHV, alpha_BSH, eta_BSH, theta_BSH)
        q, k, v, alpha, eta, theta = (tensor.to(memory.dtype).transpose(1, 2) for tensor in tensors)
        keep = 1 - alpha
        position_BS, first_BS = positions(position_B, documents_BS, q.shape[2])
        if documents_BS is not None:
            # The first token of a document resets the state, so products of decays do not cross it.
            keep, eta = (tensor.masked_fill(first_BS[:, None], 0) for tensor in (keep, eta))
        outputs = []
        for begin in range(0, q.shape[2], chunk):
            part = slice(begin, begin + chunk)
            q_, k_, v_ = q[:, :, part], k[:, :, part], v[:, :, part]
            keep_BHCC, keep_BHC = _products(keep[:, :, part])
            eta_BHCC, eta_BHC = _products(eta[:, :, part])
            of_memory_BHC, of_momentum_BHC = keep_BHC, (keep_BHCC @ eta_BHC[..., None])[..., 0]
            G_BHCC = (keep_BHCC @ eta_BHCC) * theta[:, :, None, part]
            E_BHCV = k_ @ anchor - v_
            if not aligned:
                here_BC, new_BC = position_BS[:, part], first_BS[:, part].cumsum(1) > 0
                later_BC = (here_BC // chunk > here_BC[:, :1] // chunk) & ~new_BC
                last_B = ((~later_BC & ~new_BC).sum(1) - 1).clamp(min=0)
                row = last_B[:, None, None].expand(-1, q.shape[1], 1)
                M_BHKV = (
                    of_memory_BHC.gather(2, row)[..., None] * memory
                    + of_momentum_BHC.gather(2, row)[..., None] * momentum
                    - (G_BHCC.gather(2, row[..., None].expand(-1, -1, -1, k_.shape[2])) * k_.mT) @ E_BHCV
                )
                E_BHCV = torch.where(later_BC[:, None, :, None], k_ @ M_BHKV - v_, E_BHCV)
                E_BHCV = torch.where(new_BC[:, None, :, None], -v_, E_BHCV)
                anchor = torch.where(later_BC[:, -1, None, None, None], M_BHKV, anchor)
                anchor = anchor.masked_fill(new_BC[:, -1, None, None, None], 0)
            outputs.append(
                (of_memory_BHC[..., None] * q_) @ memory
                + (of_momentum_BHC[..., None] * q_) @ momentum
                - ((q_ @ k_.mT) * G_BHCC) @ E_BHCV
            )
            memory = (
                of_memory_BHC[..., -1, None, None] * memory
                + of_momentum_BHC[..., -1, None, None] * momentum
                - (G_BHCC[..., -1, None, :] * k_.mT) @ E_BHCV
            )
            of_errors_BHC = eta_BHCC[..., -1, :] * theta[:, :, part]
            momentum = eta_BHC[..., -1, None, None] * momentum - (of_errors_BHC[..., None, :] * k_.mT) @ E_BHCV
            position_B = (position_BS[:, part][:, -1] + 1) % chunk
            anchor = torch.where((position_B == 0)[:, None, None, None], memory, anchor)
        o_BSHV = torch.cat(outputs, 2).transpose(1, 2).to(v_BSHV.dtype)
        return o_BSHV, TitansState(memory, momentum, anchor, position_B.to(torch.int32))


def positions(position_B: Tensor, documents_BS: Tensor | None, tokens: int) -> tuple[Tensor, Tensor]:
    """Returns the position of each token in its document (or carried chunk), and which tokens start a document."""
    token_S = torch.arange(tokens, device=position_B.device)
    if documents_BS is None:
        return position_B[:, None] + token_S, torch.zeros_like(token_S, dtype=torch.bool).expand(len(position_B), -1)
    first_BS = torch.cat((torch.zeros_like(documents_BS[:, :1]), documents_BS.diff(dim=1)), 1) != 0
    begin_BS = torch.where(first_BS, token_S, -position_B[:, None]).cummax(1).values
    return token_S - begin_BS, first_BS


def _products(factor_BHC: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the products of the factors from j + 1 to i, (B, H, C, C), and from the start to i, (B, H, C).

    Multiplies instead of adding logarithms, because a factor may be zero, where the logarithm is infinite.
    """
    below_CC = torch.ones((factor_BHC.shape[-1],) * 2, dtype=torch.bool, device=factor_BHC.device).tril(-1)
    factors_BHCC = torch.where(below_CC, factor_BHC[..., None], 1)
    return factors_BHCC.cumprod(-2).tril(), factor_BHC.cumprod(-1)

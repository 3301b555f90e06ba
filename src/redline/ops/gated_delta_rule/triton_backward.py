"""Triton kernels of the gated delta rule, backward. `grad_x` is the gradient of x.

The forward kernels (see `triton_forward.py` for the symbols) recompute W, U, the states and V′.

1. `local_grad_kernel`, one program per chunk: the gradient of V′ through the outputs of its own chunk.
2. `state_grad_kernel`, one program per head and block of values, from the last chunk to the first: the whole gradient
   of V′, and the gradient of the state at the end of each chunk.
3. `query_grad_kernel` and `key_grad_kernel`, one program per chunk: the gradients of q, of k except through T, of W,
   and the parts of the gradient of the cumulative log decays c that follow from them.
4. `right_grad_kernel`, one program per chunk: R_V and R_K, the gradients of β V and βγ K, which are Tᵀ times the
   gradients of U and W.
5. `system_grad_kernel`, one program per chunk: since T = (I + A)⁻¹, the gradient of A is −(R_V Uᵀ + R_K Wᵀ) below the
   diagonal. The kernel completes the gradients of k, v, β and g.

The factor exp(c_i − c_j) multiplies every product of q_i or k_i with k_j. So the gradients of c follow from the dot
products of each q and k with the gradient of that q or k, and no sums over pairs are needed. As in the forward kernels,
no kernel multiplies by the transpose of a tile that it has computed.

C: tokens per chunk, K and V: channels of a key and a value.
"""

import triton
import triton.language as tl

from redline.ops.gated_delta_rule.triton_tiles import (
    chunk_offsets,
    decays,
    load_columns,
    load_rows,
    load_state,
    pairs,
    store_rows,
    store_state,
)


@triton.jit
def local_grad_kernel(
    q, k, decay, documents, grad_out, grad_local, tokens, heads,
    KEYS: tl.constexpr, VALUES: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, C: tl.constexpr,
    PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    begin, row, left, line, page = chunk_offsets(tl.program_id(1), tl.program_id(0), tokens, heads, C)
    scores = tl.zeros((C, C), tl.float32)
    for block in tl.static_range(0, KEYS, BLOCK_K):
        x = block + tl.arange(0, BLOCK_K)
        Q = load_rows(q, row, left, heads, x, KEYS, C)
        K = load_rows(k, row, left, heads, x, KEYS, C)
        scores = tl.dot(K, tl.trans(Q), scores, input_precision=PRECISION)
    scores *= pairs(decay, documents, line, page, begin, tokens, C, PACKED, True)
    rounded = scores.to(q.dtype.element_ty)
    for block in tl.static_range(0, VALUES, BLOCK_V):
        x = block + tl.arange(0, BLOCK_V)
        grad = load_rows(grad_out, row, left, heads, x, VALUES, C)
        store_rows(grad_local, row, left, heads, x, tl.dot(rounded, grad, input_precision=PRECISION), VALUES, C)


@triton.jit
def state_grad_kernel(
    q, k, w, decay, documents, grad_out, grad_local, grad_final, grad_correction, grad_states, grad_initial,
    tokens, heads,
    KEYS: tl.constexpr, VALUES: tl.constexpr, ALL_KEYS: tl.constexpr, BLOCK_V: tl.constexpr, C: tl.constexpr,
    PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Writes the gradient of the state at the end of each chunk to `grad_states`. `grad_final` may be None."""
    sequence = tl.program_id(0)
    key = tl.arange(0, ALL_KEYS)
    value = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    chunks = tl.cdiv(tokens, C)
    first = sequence.to(tl.int64) * chunks
    grad = tl.zeros((ALL_KEYS, BLOCK_V), tl.float32)
    if grad_final is not None:
        grad = load_state(grad_final, sequence.to(tl.int64), key, value, KEYS, VALUES)
    for step in range(chunks):
        n = chunks - 1 - step
        begin, row, left, line, page = chunk_offsets(n, sequence, tokens, heads, C)
        rounded = grad.to(k.dtype.element_ty)
        store_state(grad_states, first + n, key, value, rounded, KEYS, VALUES)
        from_start, to_end, whole = decays(decay, documents, line, page, begin, tokens, C, PACKED)
        K = load_rows(k, row, left, heads, key, KEYS, C)
        local = load_rows(grad_local, row, left, heads, value, VALUES, C)
        correction = local + to_end[:, None] * tl.dot(K, rounded, input_precision=PRECISION)
        store_rows(grad_correction, row, left, heads, value, correction, VALUES, C)
        Q = load_columns(q, row, left, heads, key, KEYS, C)
        out = (from_start[:, None] * load_rows(grad_out, row, left, heads, value, VALUES, C)).to(Q.dtype)
        grad = tl.dot(Q, out, whole * grad, input_precision=PRECISION)
        W = load_columns(w, row, left, heads, key, KEYS, C)
        grad = tl.dot(W, (-correction).to(W.dtype), grad, input_precision=PRECISION)
    store_state(grad_initial, sequence.to(tl.int64), key, value, grad, KEYS, VALUES)


@triton.jit
def query_grad_kernel(
    q, k, decay, documents, states, corrections, grad_out, grad_q, grad_q_decay, tokens, heads,
    KEYS: tl.constexpr, VALUES: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, C: tl.constexpr,
    PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    begin, row, left, line, page = chunk_offsets(tl.program_id(1), tl.program_id(0), tokens, heads, C)
    index = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    i = tl.arange(0, C)
    scores = tl.zeros((C, C), tl.float32)
    for block in tl.static_range(0, VALUES, BLOCK_V):
        v = block + tl.arange(0, BLOCK_V)
        out = load_rows(grad_out, row, left, heads, v, VALUES, C)
        correction = load_rows(corrections, row, left, heads, v, VALUES, C)
        scores = tl.dot(out, tl.trans(correction), scores, input_precision=PRECISION)
    scores *= pairs(decay, documents, line, page, begin, tokens, C, PACKED, False)
    rounded = scores.to(q.dtype.element_ty)
    from_start, to_end, whole = decays(decay, documents, line, page, begin, tokens, C, PACKED)
    of_decay = tl.zeros((C,), tl.float32)
    for key_block in tl.static_range(0, KEYS, BLOCK_K):
        x = key_block + tl.arange(0, BLOCK_K)
        grad = tl.zeros((C, BLOCK_K), tl.float32)
        for block in tl.static_range(0, VALUES, BLOCK_V):
            v = block + tl.arange(0, BLOCK_V)
            out = load_rows(grad_out, row, left, heads, v, VALUES, C)
            S = load_state(states, index, x, v, KEYS, VALUES)
            grad = tl.dot(out, tl.trans(S), grad, input_precision=PRECISION)
        K = load_rows(k, row, left, heads, x, KEYS, C)
        grad = tl.dot(rounded, K, from_start[:, None] * grad, input_precision=PRECISION)
        store_rows(grad_q, row, left, heads, x, grad, KEYS, C)
        of_decay += tl.sum(grad * load_rows(q, row, left, heads, x, KEYS, C), 1)
    tl.store(grad_q_decay + line + begin + i, of_decay, mask=i < left)


@triton.jit
def key_grad_kernel(
    q, k, decay, documents, states, corrections, grad_out, grad_states, grad_correction,
    grad_k_part, grad_w, grad_k_decay, tokens, heads,
    KEYS: tl.constexpr, VALUES: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, C: tl.constexpr,
    PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    begin, row, left, line, page = chunk_offsets(tl.program_id(1), tl.program_id(0), tokens, heads, C)
    index = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    i = tl.arange(0, C)
    scores = tl.zeros((C, C), tl.float32)
    for block in tl.static_range(0, VALUES, BLOCK_V):
        v = block + tl.arange(0, BLOCK_V)
        out = load_rows(grad_out, row, left, heads, v, VALUES, C)
        correction = load_rows(corrections, row, left, heads, v, VALUES, C)
        scores = tl.dot(correction, tl.trans(out), scores, input_precision=PRECISION)
    scores *= pairs(decay, documents, line, page, begin, tokens, C, PACKED, True)
    rounded = scores.to(q.dtype.element_ty)
    from_start, to_end, whole = decays(decay, documents, line, page, begin, tokens, C, PACKED)
    of_decay = tl.zeros((C,), tl.float32)
    of_last = tl.zeros((C,), tl.float32)
    kept = tl.zeros((BLOCK_K,), tl.float32)
    for key_block in tl.static_range(0, KEYS, BLOCK_K):
        x = key_block + tl.arange(0, BLOCK_K)
        grad = tl.zeros((C, BLOCK_K), tl.float32)
        of_w = tl.zeros((C, BLOCK_K), tl.float32)
        for block in tl.static_range(0, VALUES, BLOCK_V):
            v = block + tl.arange(0, BLOCK_V)
            S = load_state(states, index, x, v, KEYS, VALUES)
            grad_S = load_state(grad_states, index, x, v, KEYS, VALUES)
            kept += tl.sum(S.to(tl.float32) * grad_S, 1)
            correction = load_rows(corrections, row, left, heads, v, VALUES, C)
            grad = tl.dot(correction, tl.trans(grad_S), grad, input_precision=PRECISION)
            of_correction = load_rows(grad_correction, row, left, heads, v, VALUES, C)
            of_w = tl.dot(of_correction, tl.trans(S), of_w, input_precision=PRECISION)
        store_rows(grad_w, row, left, heads, x, -of_w, KEYS, C)
        K = load_rows(k, row, left, heads, x, KEYS, C)
        grad *= to_end[:, None]
        of_last += tl.sum(grad * K, 1)
        Q = load_rows(q, row, left, heads, x, KEYS, C)
        grad = tl.dot(rounded, Q, grad, input_precision=PRECISION)
        store_rows(grad_k_part, row, left, heads, x, grad, KEYS, C)
        of_decay -= tl.sum(grad * K, 1)
    last = tl.sum(of_last, 0) + whole * tl.sum(kept, 0)
    of_decay = tl.where(i == min(left, C) - 1, of_decay + last, of_decay)
    tl.store(grad_k_decay + line + begin + i, of_decay, mask=i < left)


@triton.jit
def right_grad_kernel(
    inverse, grad_correction, grad_w, grad_v_right, grad_k_right, tokens, heads,
    KEYS: tl.constexpr, VALUES: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, C: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    begin, row, left, line, page = chunk_offsets(tl.program_id(1), tl.program_id(0), tokens, heads, C)
    i = tl.arange(0, C)
    corner = (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * (C * C)
    T = tl.load(inverse + corner + i[:, None] + i[None, :] * C)
    for block in tl.static_range(0, VALUES, BLOCK_V):
        x = block + tl.arange(0, BLOCK_V)
        grad = load_rows(grad_correction, row, left, heads, x, VALUES, C)
        store_rows(grad_v_right, row, left, heads, x, tl.dot(T, grad, input_precision=PRECISION), VALUES, C)
    for block in tl.static_range(0, KEYS, BLOCK_K):
        x = block + tl.arange(0, BLOCK_K)
        grad = load_rows(grad_w, row, left, heads, x, KEYS, C)
        store_rows(grad_k_right, row, left, heads, x, tl.dot(T, grad, input_precision=PRECISION), KEYS, C)


@triton.jit
def system_grad_kernel(
    k, v, beta, decay, documents, w, u, grad_v_right, grad_k_right, grad_k_part, grad_q_decay, grad_k_decay,
    grad_k, grad_v, grad_g, grad_beta, tokens, heads,
    KEYS: tl.constexpr, VALUES: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, C: tl.constexpr,
    PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    begin, row, left, line, page = chunk_offsets(tl.program_id(1), tl.program_id(0), tokens, heads, C)
    i = tl.arange(0, C)
    factor = tl.load(beta + line + begin + i, mask=i < left, other=0.0)
    from_start, to_end, whole = decays(decay, documents, line, page, begin, tokens, C, PACKED)
    of_beta = tl.zeros((C,), tl.float32)
    below = tl.zeros((C, C), tl.float32)
    above = tl.zeros((C, C), tl.float32)  # the transpose of `below`
    for block in tl.static_range(0, VALUES, BLOCK_V):
        x = block + tl.arange(0, BLOCK_V)
        right = load_rows(grad_v_right, row, left, heads, x, VALUES, C)
        U = load_rows(u, row, left, heads, x, VALUES, C)
        below = tl.dot(right, tl.trans(U), below, input_precision=PRECISION)
        above = tl.dot(U, tl.trans(right), above, input_precision=PRECISION)
        store_rows(grad_v, row, left, heads, x, factor[:, None] * right, VALUES, C)
        of_beta += tl.sum(right.to(tl.float32) * load_rows(v, row, left, heads, x, VALUES, C), 1)
    for block in tl.static_range(0, KEYS, BLOCK_K):
        x = block + tl.arange(0, BLOCK_K)
        right = load_rows(grad_k_right, row, left, heads, x, KEYS, C)
        W = load_rows(w, row, left, heads, x, KEYS, C)
        below = tl.dot(right, tl.trans(W), below, input_precision=PRECISION)
        above = tl.dot(W, tl.trans(right), above, input_precision=PRECISION)
    strictly = i[:, None] > i[None, :]
    below *= pairs(decay, documents, line, page, begin, tokens, C, PACKED, False)
    below = tl.where(strictly, -below, 0.0).to(k.dtype.element_ty)
    above *= pairs(decay, documents, line, page, begin, tokens, C, PACKED, True) * factor[None, :]
    above = tl.where(i[:, None] < i[None, :], -above, 0.0).to(k.dtype.element_ty)
    of_decay = tl.load(grad_q_decay + line + begin + i, mask=i < left, other=0.0)
    of_decay += tl.load(grad_k_decay + line + begin + i, mask=i < left, other=0.0)
    for block in tl.static_range(0, KEYS, BLOCK_K):
        x = block + tl.arange(0, BLOCK_K)
        K = load_rows(k, row, left, heads, x, KEYS, C)
        right = load_rows(grad_k_right, row, left, heads, x, KEYS, C)
        # A token's key contributes to its row of A with its own β, and to its column with the β of later tokens.
        in_row = from_start[:, None] * right + tl.dot(below, K, input_precision=PRECISION)
        in_column = tl.dot(above, K, input_precision=PRECISION)
        of_row = tl.sum(in_row * K, 1)
        of_beta += of_row
        of_decay += factor * of_row - tl.sum(in_column * K, 1)
        grad = load_rows(grad_k_part, row, left, heads, x, KEYS, C) + factor[:, None] * in_row + in_column
        store_rows(grad_k, row, left, heads, x, grad, KEYS, C)
    tl.store(grad_beta + line + begin + i, of_beta, mask=i < left)
    # The log decay g of a token is added to the c of this token and of all later tokens.
    of_g = tl.sum(tl.where(i[:, None] >= i[None, :], of_decay[:, None], 0.0), 0)
    tl.store(grad_g + line + begin + i, of_g, mask=i < left)

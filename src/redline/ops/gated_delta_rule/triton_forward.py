"""Triton kernels of the gated delta rule, forward.

Inside a chunk, c are the cumulative log decays and γ = exp(c). A is strictly lower triangular, with
A_ij = β_i exp(c_i − c_j) k_iᵀ k_j, and S is the state at the start of the chunk.

1. `inverse_kernel`, one program per chunk: T = (I + A)⁻¹ and c.
2. `solve_kernel`, one program per chunk: U = T β V and W = T βγ K.
3. `state_kernel`, one program per head and block of values, sequential over chunks: V′ = U − W S and the next S.
4. `output_kernel`, one program per chunk: O from S and V′.

No kernel multiplies by the transpose of a tile that it has computed, because Triton 3.4 to 3.7.0 miscompiles that on
Hopper. Transposed tiles are loaded from memory or computed separately.

B: sequences, H: heads, N: chunks, C: tokens per chunk, S: tokens, K and V: channels of a key and a value. T is
(B, H, N, C, C), c is (B, H, S), states are (B, H, N, K, V); W, U and V′ have the layouts of k and v.
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
def _sums(g, decay, line, begin, tokens, before):
    """Stores and returns the cumulative log decays of a block, with `before` added, and returns the new total."""
    i = tl.arange(0, 16)
    token = begin + i
    values = tl.load(g + line + token, mask=token < tokens, other=0.0)
    sums = before + tl.sum(tl.where(i[:, None] >= i[None, :], values[None, :], 0.0), 1)
    tl.store(decay + line + token, sums, mask=token < tokens)
    return sums, before + tl.sum(values, 0)


@triton.jit
def _system(
    k, beta, documents, chunk, ROW: tl.constexpr, COLUMN: tl.constexpr, c_i, c_j,
    KEYS: tl.constexpr, BLOCK_K: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes block (ROW, COLUMN) of A."""
    row, line, page, begin, tokens, heads = chunk
    i = tl.arange(0, 16)
    t_i = begin + ROW * 16 + i
    t_j = begin + COLUMN * 16 + i
    product = tl.zeros((16, 16), tl.float32)
    for block in tl.static_range(0, KEYS, BLOCK_K):
        x = block + tl.arange(0, BLOCK_K)
        k_i = load_rows(k, row + ROW * 16 * heads, tokens - begin - ROW * 16, heads, x, KEYS, 16)
        k_j = load_columns(k, row + COLUMN * 16 * heads, tokens - begin - COLUMN * 16, heads, x, KEYS, 16)
        product = tl.dot(k_i, k_j, product, input_precision=PRECISION)
    known = (t_i < tokens)[:, None] & (t_i[:, None] > t_j[None, :])
    if PACKED:
        d_i = tl.load(documents + page + t_i, mask=t_i < tokens, other=0)
        d_j = tl.load(documents + page + t_j, mask=t_j < tokens, other=0)
        known = known & (d_i[:, None] == d_j[None, :])
    beta_i = tl.load(beta + line + t_i, mask=t_i < tokens, other=0.0)
    return beta_i[:, None] * product * tl.exp(tl.where(known, c_i[:, None] - c_j[None, :], float("-inf")))


@triton.jit
def _eliminate(A, T, column):
    """One step of forward substitution: eliminates row `column` of T, which is final, from all rows below."""
    i = tl.arange(0, 16)
    factor = tl.sum(tl.where(i[None, :] == column, A, 0.0), 1)
    final = tl.sum(tl.where(i[:, None] == column, T, 0.0), 0)
    return T - factor[:, None] * final[None, :]


@triton.jit
def _product(a, b):
    return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def _store_block(inverse, corner, T, ROW: tl.constexpr, COLUMN: tl.constexpr, C: tl.constexpr):
    i = tl.arange(0, 16)
    tl.store(inverse + corner + (ROW * 16 + i[:, None]) * C + COLUMN * 16 + i[None, :], T.to(inverse.dtype.element_ty))


@triton.jit
def inverse_kernel(
    k, g, beta, documents, decay, inverse, tokens, heads,
    KEYS: tl.constexpr, BLOCK_K: tl.constexpr, C: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes T in fp32 blocks of 16 × 16: diagonal blocks by substitution, and from these the blocks below."""
    begin, row, left, line, page = chunk_offsets(tl.program_id(1), tl.program_id(0), tokens, heads, C)
    chunk = (row, line, page, begin, tokens, heads)
    corner = (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * (C * C)
    i = tl.arange(0, 16)
    one = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    none = tl.zeros((16, 16), tl.float32)
    c_0, total = _sums(g, decay, line, begin, tokens, 0.0)
    A_00 = _system(k, beta, documents, chunk, 0, 0, c_0, c_0, KEYS, BLOCK_K, PACKED, PRECISION)
    T_00 = one
    if C >= 32:
        c_1, total = _sums(g, decay, line, begin + 16, tokens, total)
        A_11 = _system(k, beta, documents, chunk, 1, 1, c_1, c_1, KEYS, BLOCK_K, PACKED, PRECISION)
        T_11 = one
    if C >= 64:
        c_2, total = _sums(g, decay, line, begin + 32, tokens, total)
        A_22 = _system(k, beta, documents, chunk, 2, 2, c_2, c_2, KEYS, BLOCK_K, PACKED, PRECISION)
        T_22 = one
        c_3, total = _sums(g, decay, line, begin + 48, tokens, total)
        A_33 = _system(k, beta, documents, chunk, 3, 3, c_3, c_3, KEYS, BLOCK_K, PACKED, PRECISION)
        T_33 = one
    for column in range(15):
        T_00 = _eliminate(A_00, T_00, column)
        if C >= 32:
            T_11 = _eliminate(A_11, T_11, column)
        if C >= 64:
            T_22 = _eliminate(A_22, T_22, column)
            T_33 = _eliminate(A_33, T_33, column)
    _store_block(inverse, corner, T_00, 0, 0, C)
    if C >= 32:
        A_10 = _system(k, beta, documents, chunk, 1, 0, c_1, c_0, KEYS, BLOCK_K, PACKED, PRECISION)
        T_10 = -_product(T_11, _product(A_10, T_00))
        _store_block(inverse, corner, none, 0, 1, C)
        _store_block(inverse, corner, T_10, 1, 0, C)
        _store_block(inverse, corner, T_11, 1, 1, C)
    if C >= 64:
        A_20 = _system(k, beta, documents, chunk, 2, 0, c_2, c_0, KEYS, BLOCK_K, PACKED, PRECISION)
        A_21 = _system(k, beta, documents, chunk, 2, 1, c_2, c_1, KEYS, BLOCK_K, PACKED, PRECISION)
        T_20 = -_product(T_22, _product(A_20, T_00) + _product(A_21, T_10))
        T_21 = -_product(T_22, _product(A_21, T_11))
        _store_block(inverse, corner, T_20, 2, 0, C)
        _store_block(inverse, corner, T_21, 2, 1, C)
        _store_block(inverse, corner, T_22, 2, 2, C)
        A_30 = _system(k, beta, documents, chunk, 3, 0, c_3, c_0, KEYS, BLOCK_K, PACKED, PRECISION)
        A_31 = _system(k, beta, documents, chunk, 3, 1, c_3, c_1, KEYS, BLOCK_K, PACKED, PRECISION)
        A_32 = _system(k, beta, documents, chunk, 3, 2, c_3, c_2, KEYS, BLOCK_K, PACKED, PRECISION)
        T_30 = -_product(T_33, _product(A_30, T_00) + _product(A_31, T_10) + _product(A_32, T_20))
        T_31 = -_product(T_33, _product(A_31, T_11) + _product(A_32, T_21))
        T_32 = -_product(T_33, _product(A_32, T_22))
        _store_block(inverse, corner, T_30, 3, 0, C)
        _store_block(inverse, corner, T_31, 3, 1, C)
        _store_block(inverse, corner, T_32, 3, 2, C)
        _store_block(inverse, corner, T_33, 3, 3, C)
        _store_block(inverse, corner, none, 0, 2, C)
        _store_block(inverse, corner, none, 0, 3, C)
        _store_block(inverse, corner, none, 1, 2, C)
        _store_block(inverse, corner, none, 1, 3, C)
        _store_block(inverse, corner, none, 2, 3, C)


@triton.jit
def solve_kernel(
    k, v, beta, decay, documents, inverse, w, u, tokens, heads,
    KEYS: tl.constexpr, VALUES: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, C: tl.constexpr,
    PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    begin, row, left, line, page = chunk_offsets(tl.program_id(1), tl.program_id(0), tokens, heads, C)
    i = tl.arange(0, C)
    corner = (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * (C * C)
    T = tl.load(inverse + corner + i[:, None] * C + i[None, :])
    factor = tl.load(beta + line + begin + i, mask=i < left, other=0.0)
    for block in tl.static_range(0, VALUES, BLOCK_V):
        x = block + tl.arange(0, BLOCK_V)
        right = (factor[:, None] * load_rows(v, row, left, heads, x, VALUES, C)).to(T.dtype)
        store_rows(u, row, left, heads, x, tl.dot(T, right, input_precision=PRECISION), VALUES, C)
    from_start, to_end, whole = decays(decay, documents, line, page, begin, tokens, C, PACKED)
    factor *= from_start
    for block in tl.static_range(0, KEYS, BLOCK_K):
        x = block + tl.arange(0, BLOCK_K)
        right = (factor[:, None] * load_rows(k, row, left, heads, x, KEYS, C)).to(T.dtype)
        store_rows(w, row, left, heads, x, tl.dot(T, right, input_precision=PRECISION), KEYS, C)


@triton.jit
def state_kernel(
    k, w, u, decay, documents, initial, states, corrections, final, tokens, heads,
    KEYS: tl.constexpr, VALUES: tl.constexpr, ALL_KEYS: tl.constexpr, BLOCK_V: tl.constexpr, C: tl.constexpr,
    PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Writes the state at the start of each chunk to `states`. `initial` may be None."""
    sequence = tl.program_id(0)
    key = tl.arange(0, ALL_KEYS)
    value = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    chunks = tl.cdiv(tokens, C)
    first = sequence.to(tl.int64) * chunks
    S = tl.zeros((ALL_KEYS, BLOCK_V), tl.float32)
    if initial is not None:
        S = load_state(initial, sequence.to(tl.int64), key, value, KEYS, VALUES)
    for n in range(chunks):
        begin, row, left, line, page = chunk_offsets(n, sequence, tokens, heads, C)
        rounded = S.to(k.dtype.element_ty)
        store_state(states, first + n, key, value, rounded, KEYS, VALUES)
        from_start, to_end, whole = decays(decay, documents, line, page, begin, tokens, C, PACKED)
        W = load_rows(w, row, left, heads, key, KEYS, C)
        U = load_rows(u, row, left, heads, value, VALUES, C)
        correction = U - tl.dot(W, rounded, input_precision=PRECISION)
        store_rows(corrections, row, left, heads, value, correction, VALUES, C)
        K = load_columns(k, row, left, heads, key, KEYS, C)
        S = tl.dot(K, (to_end[:, None] * correction).to(K.dtype), whole * S, input_precision=PRECISION)
    store_state(final, sequence.to(tl.int64), key, value, S, KEYS, VALUES)


@triton.jit
def output_kernel(
    q, k, decay, documents, states, corrections, out, tokens, heads,
    KEYS: tl.constexpr, VALUES: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, C: tl.constexpr,
    PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    begin, row, left, line, page = chunk_offsets(tl.program_id(1), tl.program_id(0), tokens, heads, C)
    index = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    scores = tl.zeros((C, C), tl.float32)
    for block in tl.static_range(0, KEYS, BLOCK_K):
        x = block + tl.arange(0, BLOCK_K)
        Q = load_rows(q, row, left, heads, x, KEYS, C)
        K = load_rows(k, row, left, heads, x, KEYS, C)
        scores = tl.dot(Q, tl.trans(K), scores, input_precision=PRECISION)
    scores *= pairs(decay, documents, line, page, begin, tokens, C, PACKED, False)
    rounded = scores.to(q.dtype.element_ty)
    from_start, to_end, whole = decays(decay, documents, line, page, begin, tokens, C, PACKED)
    for value_block in tl.static_range(0, VALUES, BLOCK_V):
        v = value_block + tl.arange(0, BLOCK_V)
        mixed = tl.zeros((C, BLOCK_V), tl.float32)
        for block in tl.static_range(0, KEYS, BLOCK_K):
            x = block + tl.arange(0, BLOCK_K)
            Q = load_rows(q, row, left, heads, x, KEYS, C)
            S = load_state(states, index, x, v, KEYS, VALUES)
            mixed = tl.dot(Q, S, mixed, input_precision=PRECISION)
        correction = load_rows(corrections, row, left, heads, v, VALUES, C)
        mixed = tl.dot(rounded, correction, from_start[:, None] * mixed, input_precision=PRECISION)
        store_rows(out, row, left, heads, v, mixed, VALUES, C)

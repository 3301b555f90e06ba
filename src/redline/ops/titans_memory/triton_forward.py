"""Triton kernels of the Titans memory, forward.

Inside a chunk everything is linear in the initial memory M, the initial momentum S, and the errors D = V − K M₀:

    O = a Q M + f Q S + (Q Kᵀ ⊙ G) D        M′ = a_C M + f_C S + (G_C K)ᵀ D        S′ = m_C S + (s_C K)ᵀ D

The subscript C denotes the value at the chunk's last token.

1. `gate_kernel`, one program per chunk: a, f, m, G and s from the gates, row by row, with
   s_i = η_i s_{i−1} + θ_i e_i and G_i = (1 − α_i) G_{i−1} + s_i, where e_i is the i-th unit vector. There is no
   division, so gates may be zero.
2. `state_kernel`, one program per head and block of values, sequential over chunks: D and the next M and S.
3. `output_kernel`, one program per chunk: O.

With documents or a carried state, chunks do not end at multiples of C tokens. The tokens are then divided into N blocks
of C tokens, and `wrap` (B, N) holds the token after the end of the chunk that each block's first token belongs to. Each
block is split there into two parts (SPLIT is 2); the second part starts with a new M₀. `fresh` marks tokens of a
document's first chunk, where M₀ is zero.

B: sequences, H: heads, S: tokens, C: tokens per chunk, K and V: channels of a key and a value. G and s are (B, H,
chunks, C, C), `last` holds their last rows, `whole` a_C, f_C and m_C; states are (B, H, chunks, K, V), and values per
token and head are (B, H, S).
"""

import triton
import triton.language as tl

from redline.ops.gated_delta_rule.triton_tiles import load_columns, load_rows, load_state, store_rows, store_state


@triton.jit
def chunk_offsets(index, sequence, wrap, tokens, heads, C: tl.constexpr, SPLIT: tl.constexpr):
    """Returns the chunk's first token, the row of this token and head, the number of tokens, and the head's offset.

    The row is an index into tensors (B, S, H, X), in rows of X elements. The offset is an index into tensors (B, H, S).
    """
    batch = (sequence // heads).to(tl.int64)
    begin = index // SPLIT * C
    end = min(begin + C, tokens)
    if SPLIT == 2:
        cut = min(tl.load(wrap + batch * tl.cdiv(tokens, C) + index // 2), end)
        second = index % 2 == 1
        begin = tl.where(second, cut, begin)
        end = tl.where(second, end, cut)
    row = (batch * tokens + begin) * heads + sequence % heads
    return begin, row, end - begin, sequence.to(tl.int64) * tokens


@triton.jit
def anchor_mask(fresh, page, begin, count, C: tl.constexpr, SPLIT: tl.constexpr):
    """Returns 1 for tokens that use the M₀ of the chunk, and 0 for tokens whose M₀ is zero."""
    i = tl.arange(0, C)
    factor = tl.where(i < count, 1.0, 0.0)
    if SPLIT == 2:
        factor = tl.where(tl.load(fresh + page + begin + i, mask=i < count, other=1) == 0, factor, 0.0)
    return factor


@triton.jit
def load_gain(gain, index, count, C: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Loads G of a chunk, or with TRANSPOSED the transpose of G."""
    i = tl.arange(0, C)
    if TRANSPOSED:
        return tl.load(gain + index * (C * C) + i[None, :] * C + i[:, None], mask=(i < count)[None, :], other=0.0)
    return tl.load(gain + index * (C * C) + i[:, None] * C + i[None, :], mask=(i < count)[:, None], other=0.0)


@triton.jit
def gate_kernel(
    keep, eta, theta, wrap, gain, momentum_gain, of_memory, of_momentum, products, last, whole, tokens, heads,
    C: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0)
    begin, row, count, line = chunk_offsets(tl.program_id(1), sequence, wrap, tokens, heads, C, SPLIT)
    index = sequence.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    j = tl.arange(0, C)
    G = tl.zeros((C,), tl.float32)
    s = tl.zeros((C,), tl.float32)
    a, f, m = 1.0, 0.0, 1.0
    for i in range(count):
        token = line + begin + i
        keep_i = tl.load(keep + token)
        eta_i = tl.load(eta + token)
        s = eta_i * s + tl.where(j == i, tl.load(theta + token), 0.0)
        G = keep_i * G + s
        m = eta_i * m
        f = keep_i * f + m
        a = keep_i * a
        tl.store(gain + index * (C * C) + i * C + j, G)
        tl.store(momentum_gain + index * (C * C) + i * C + j, s)
        tl.store(of_memory + token, a)
        tl.store(of_momentum + token, f)
        tl.store(products + token, m)
    tl.store(last + index * (2 * C) + j, G)
    tl.store(last + index * (2 * C) + C + j, s)
    tl.store(whole + index * 3, a)
    tl.store(whole + index * 3 + 1, f)
    tl.store(whole + index * 3 + 2, m)


@triton.jit
def state_kernel(
    k, v, wrap, fresh, last, whole, memory, momentum, anchor, memories, momenta, anchors, errors,
    final_memory, final_momentum, final_anchor, tokens, heads,
    KEYS: tl.constexpr, VALUES: tl.constexpr, ALL_KEYS: tl.constexpr, BLOCK_V: tl.constexpr, C: tl.constexpr,
    SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Writes the state at the start of each chunk to `memories`, `momenta` and `anchors`. `memory` may be None."""
    sequence = tl.program_id(0)
    lane = sequence.to(tl.int64)
    page = (sequence // heads).to(tl.int64) * tokens
    key = tl.arange(0, ALL_KEYS)
    value = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    i = tl.arange(0, C)
    blocks = tl.cdiv(tokens, C)
    M = tl.zeros((ALL_KEYS, BLOCK_V), tl.float32)
    S = tl.zeros((ALL_KEYS, BLOCK_V), tl.float32)
    A = tl.zeros((ALL_KEYS, BLOCK_V), tl.float32)
    if memory is not None:
        M = load_state(memory, lane, key, value, KEYS, VALUES)
        S = load_state(momentum, lane, key, value, KEYS, VALUES)
        A = load_state(anchor, lane, key, value, KEYS, VALUES)
    for n in range(blocks * SPLIT):
        begin, row, count, line = chunk_offsets(n, sequence, wrap, tokens, heads, C, SPLIT)
        index = lane * (blocks * SPLIT) + n
        if SPLIT == 2:
            reached = tl.load(wrap + (sequence // heads) * blocks + n // 2) <= tokens
            A = tl.where((n % 2 == 1) & reached, M, A)
        else:
            A = M
        rounded = A.to(k.dtype.element_ty)
        store_state(memories, index, key, value, M, KEYS, VALUES)
        store_state(momenta, index, key, value, S, KEYS, VALUES)
        if SPLIT == 2:
            store_state(anchors, index, key, value, A, KEYS, VALUES)
        K = load_rows(k, row, count, heads, key, KEYS, C)
        held = tl.dot(K, rounded, input_precision=PRECISION) * anchor_mask(fresh, page, begin, count, C, SPLIT)[:, None]
        D = load_rows(v, row, count, heads, value, VALUES, C) - held
        store_rows(errors, row, count, heads, value, D, VALUES, C)
        K = load_columns(k, row, count, heads, key, KEYS, C)
        G_last = tl.load(last + index * (2 * C) + i)
        s_last = tl.load(last + index * (2 * C) + C + i)
        M = tl.load(whole + index * 3) * M + tl.load(whole + index * 3 + 1) * S
        M = tl.dot(K, (G_last[:, None] * D).to(K.dtype), M, input_precision=PRECISION)
        S = tl.load(whole + index * 3 + 2) * S
        S = tl.dot(K, (s_last[:, None] * D).to(K.dtype), S, input_precision=PRECISION)
    store_state(final_memory, lane, key, value, M, KEYS, VALUES)
    store_state(final_momentum, lane, key, value, S, KEYS, VALUES)
    store_state(final_anchor, lane, key, value, A, KEYS, VALUES)


@triton.jit
def output_kernel(
    q, k, wrap, gain, of_memory, of_momentum, memories, momenta, errors, out, tokens, heads,
    KEYS: tl.constexpr, VALUES: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, C: tl.constexpr,
    SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    begin, row, count, line = chunk_offsets(tl.program_id(1), tl.program_id(0), wrap, tokens, heads, C, SPLIT)
    index = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    i = tl.arange(0, C)
    scores = tl.zeros((C, C), tl.float32)
    for block in tl.static_range(0, KEYS, BLOCK_K):
        x = block + tl.arange(0, BLOCK_K)
        Q = load_rows(q, row, count, heads, x, KEYS, C)
        K = load_rows(k, row, count, heads, x, KEYS, C)
        scores = tl.dot(Q, tl.trans(K), scores, input_precision=PRECISION)
    rounded = (scores * load_gain(gain, index, count, C, False)).to(q.dtype.element_ty)
    a = tl.load(of_memory + line + begin + i, mask=i < count, other=0.0)
    f = tl.load(of_momentum + line + begin + i, mask=i < count, other=0.0)
    for value_block in tl.static_range(0, VALUES, BLOCK_V):
        v = value_block + tl.arange(0, BLOCK_V)
        from_memory = tl.zeros((C, BLOCK_V), tl.float32)
        from_momentum = tl.zeros((C, BLOCK_V), tl.float32)
        for block in tl.static_range(0, KEYS, BLOCK_K):
            x = block + tl.arange(0, BLOCK_K)
            Q = load_rows(q, row, count, heads, x, KEYS, C)
            M = load_state(memories, index, x, v, KEYS, VALUES)
            from_memory = tl.dot(Q, M, from_memory, input_precision=PRECISION)
            S = load_state(momenta, index, x, v, KEYS, VALUES)
            from_momentum = tl.dot(Q, S, from_momentum, input_precision=PRECISION)
        mixed = a[:, None] * from_memory + f[:, None] * from_momentum
        D = load_rows(errors, row, count, heads, v, VALUES, C)
        mixed = tl.dot(rounded, D, mixed, input_precision=PRECISION)
        store_rows(out, row, count, heads, v, mixed, VALUES, C)

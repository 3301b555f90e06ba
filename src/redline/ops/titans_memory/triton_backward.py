"""Triton kernels of the Titans memory, backward. `grad_x` is the gradient of x.

The forward kernels recompute their intermediate tensors.

1. `local_grad_kernel`, one program per chunk: the gradient of the errors D through the outputs of their own chunk.
2. `state_grad_kernel`, one program per head and block of values, from the last chunk to the first: the whole gradient
   of D, which is that of v, and the gradients of memory and momentum at the end of each chunk.
3. `query_grad_kernel` and `key_grad_kernel`, one program per chunk: the gradients of q and k, and of a, f, m, G and s.
4. `gate_grad_kernel`, one program per chunk: from these the gradients of the gates, row by row from last to first.

No kernel multiplies by the transpose of a tile that it has computed, because Triton 3.4 to 3.7.0 miscompiles that on
Hopper.

C: tokens per chunk, K and V: channels of a key and a value.
"""

import triton
import triton.language as tl

from redline.ops.gated_delta_rule.triton_tiles import load_columns, load_rows, load_state, store_rows, store_state
from redline.ops.titans_memory.triton_forward import anchor_mask, chunk_offsets, load_gain


@triton.jit
def local_grad_kernel(
    q, k, wrap, gain, grad_out, grad_local, tokens, heads,
    KEYS: tl.constexpr, VALUES: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, C: tl.constexpr,
    SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    begin, row, count, line = chunk_offsets(tl.program_id(1), tl.program_id(0), wrap, tokens, heads, C, SPLIT)
    index = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    scores = tl.zeros((C, C), tl.float32)
    for block in tl.static_range(0, KEYS, BLOCK_K):
        x = block + tl.arange(0, BLOCK_K)
        Q = load_rows(q, row, count, heads, x, KEYS, C)
        K = load_rows(k, row, count, heads, x, KEYS, C)
        scores = tl.dot(K, tl.trans(Q), scores, input_precision=PRECISION)
    rounded = (scores * load_gain(gain, index, count, C, True)).to(q.dtype.element_ty)
    for block in tl.static_range(0, VALUES, BLOCK_V):
        x = block + tl.arange(0, BLOCK_V)
        grad = load_rows(grad_out, row, count, heads, x, VALUES, C)
        store_rows(grad_local, row, count, heads, x, tl.dot(rounded, grad, input_precision=PRECISION), VALUES, C)


@triton.jit
def state_grad_kernel(
    q, k, wrap, fresh, last, whole, of_memory, of_momentum, grad_out, grad_local,
    grad_final_memory, grad_final_momentum, grad_final_anchor, grad_v, grad_memories, grad_momenta,
    grad_memory, grad_momentum, grad_anchor, tokens, heads,
    KEYS: tl.constexpr, VALUES: tl.constexpr, ALL_KEYS: tl.constexpr, BLOCK_V: tl.constexpr, C: tl.constexpr,
    SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Writes the gradients of the state at the end of each chunk to `grad_memories` and `grad_momenta`."""
    sequence = tl.program_id(0)
    lane = sequence.to(tl.int64)
    page = (sequence // heads).to(tl.int64) * tokens
    key = tl.arange(0, ALL_KEYS)
    value = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    i = tl.arange(0, C)
    blocks = tl.cdiv(tokens, C)
    M = load_state(grad_final_memory, lane, key, value, KEYS, VALUES)
    S = load_state(grad_final_momentum, lane, key, value, KEYS, VALUES)
    A = load_state(grad_final_anchor, lane, key, value, KEYS, VALUES)
    for step in range(blocks * SPLIT):
        n = blocks * SPLIT - 1 - step
        begin, row, count, line = chunk_offsets(n, sequence, wrap, tokens, heads, C, SPLIT)
        index = lane * (blocks * SPLIT) + n
        M_rounded = M.to(k.dtype.element_ty)
        S_rounded = S.to(k.dtype.element_ty)
        store_state(grad_memories, index, key, value, M_rounded, KEYS, VALUES)
        store_state(grad_momenta, index, key, value, S_rounded, KEYS, VALUES)
        G_last = tl.load(last + index * (2 * C) + i)
        s_last = tl.load(last + index * (2 * C) + C + i)
        K = load_rows(k, row, count, heads, key, KEYS, C)
        D = load_rows(grad_local, row, count, heads, value, VALUES, C).to(tl.float32)
        D += G_last[:, None] * tl.dot(K, M_rounded, input_precision=PRECISION)
        D += s_last[:, None] * tl.dot(K, S_rounded, input_precision=PRECISION)
        store_rows(grad_v, row, count, heads, value, D, VALUES, C)
        Q = load_columns(q, row, count, heads, key, KEYS, C)
        out = load_rows(grad_out, row, count, heads, value, VALUES, C)
        a = tl.load(of_memory + line + begin + i, mask=i < count, other=0.0)
        f = tl.load(of_momentum + line + begin + i, mask=i < count, other=0.0)
        S = tl.load(whole + index * 3 + 1) * M + tl.load(whole + index * 3 + 2) * S
        S = tl.dot(Q, (f[:, None] * out).to(Q.dtype), S, input_precision=PRECISION)
        M = tl.load(whole + index * 3) * M
        M = tl.dot(Q, (a[:, None] * out).to(Q.dtype), M, input_precision=PRECISION)
        of_anchor = -anchor_mask(fresh, page, begin, count, C, SPLIT)[:, None] * D
        K = load_columns(k, row, count, heads, key, KEYS, C)
        if SPLIT == 2:
            A = tl.dot(K, of_anchor.to(K.dtype), A, input_precision=PRECISION)
            reached = tl.load(wrap + (sequence // heads) * blocks + n // 2) <= tokens
            renewed = (n % 2 == 1) & reached
            M = tl.where(renewed, M + A, M)
            A = tl.where(renewed, 0.0, A)
        else:
            M = tl.dot(K, of_anchor.to(K.dtype), M + A, input_precision=PRECISION)
            A = tl.zeros((ALL_KEYS, BLOCK_V), tl.float32)
    store_state(grad_memory, lane, key, value, M, KEYS, VALUES)
    store_state(grad_momentum, lane, key, value, S, KEYS, VALUES)
    store_state(grad_anchor, lane, key, value, A, KEYS, VALUES)


@triton.jit
def query_grad_kernel(
    q, k, wrap, gain, of_memory, of_momentum, memories, momenta, errors, grad_out,
    grad_q, grad_gain, grad_of_memory, grad_of_momentum, tokens, heads,
    KEYS: tl.constexpr, VALUES: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, C: tl.constexpr,
    SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    begin, row, count, line = chunk_offsets(tl.program_id(1), tl.program_id(0), wrap, tokens, heads, C, SPLIT)
    index = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    i = tl.arange(0, C)
    grads = tl.zeros((C, C), tl.float32)
    for block in tl.static_range(0, VALUES, BLOCK_V):
        v = block + tl.arange(0, BLOCK_V)
        out = load_rows(grad_out, row, count, heads, v, VALUES, C)
        D = load_rows(errors, row, count, heads, v, VALUES, C)
        grads = tl.dot(out, tl.trans(D), grads, input_precision=PRECISION)
    rounded = (grads * load_gain(gain, index, count, C, False)).to(q.dtype.element_ty)
    a = tl.load(of_memory + line + begin + i, mask=i < count, other=0.0)
    f = tl.load(of_momentum + line + begin + i, mask=i < count, other=0.0)
    scores = tl.zeros((C, C), tl.float32)
    of_a = tl.zeros((C,), tl.float32)
    of_f = tl.zeros((C,), tl.float32)
    for key_block in tl.static_range(0, KEYS, BLOCK_K):
        x = key_block + tl.arange(0, BLOCK_K)
        from_memory = tl.zeros((C, BLOCK_K), tl.float32)
        from_momentum = tl.zeros((C, BLOCK_K), tl.float32)
        for block in tl.static_range(0, VALUES, BLOCK_V):
            v = block + tl.arange(0, BLOCK_V)
            out = load_rows(grad_out, row, count, heads, v, VALUES, C)
            M = load_state(memories, index, x, v, KEYS, VALUES)
            from_memory = tl.dot(out, tl.trans(M), from_memory, input_precision=PRECISION)
            S = load_state(momenta, index, x, v, KEYS, VALUES)
            from_momentum = tl.dot(out, tl.trans(S), from_momentum, input_precision=PRECISION)
        Q = load_rows(q, row, count, heads, x, KEYS, C)
        K = load_rows(k, row, count, heads, x, KEYS, C)
        scores = tl.dot(Q, tl.trans(K), scores, input_precision=PRECISION)
        of_a += tl.sum(from_memory * Q, 1)
        of_f += tl.sum(from_momentum * Q, 1)
        grad = a[:, None] * from_memory + f[:, None] * from_momentum
        grad = tl.dot(rounded, K, grad, input_precision=PRECISION)
        store_rows(grad_q, row, count, heads, x, grad, KEYS, C)
    tl.store(grad_gain + index * (C * C) + i[:, None] * C + i[None, :], grads * scores)
    tl.store(grad_of_memory + line + begin + i, of_a, mask=i < count)
    tl.store(grad_of_momentum + line + begin + i, of_f, mask=i < count)


@triton.jit
def key_grad_kernel(
    q, k, wrap, fresh, gain, last, memories, momenta, anchors, errors, grad_out, grad_v, grad_memories, grad_momenta,
    grad_k, grad_last, grad_whole, tokens, heads,
    KEYS: tl.constexpr, VALUES: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, C: tl.constexpr,
    SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    begin, row, count, line = chunk_offsets(tl.program_id(1), tl.program_id(0), wrap, tokens, heads, C, SPLIT)
    index = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    page = (tl.program_id(0) // heads).to(tl.int64) * tokens
    i = tl.arange(0, C)
    grads = tl.zeros((C, C), tl.float32)
    for block in tl.static_range(0, VALUES, BLOCK_V):
        v = block + tl.arange(0, BLOCK_V)
        out = load_rows(grad_out, row, count, heads, v, VALUES, C)
        D = load_rows(errors, row, count, heads, v, VALUES, C)
        grads = tl.dot(D, tl.trans(out), grads, input_precision=PRECISION)
    rounded = (grads * load_gain(gain, index, count, C, True)).to(q.dtype.element_ty)
    G_last = tl.load(last + index * (2 * C) + i)
    s_last = tl.load(last + index * (2 * C) + C + i)
    factor = anchor_mask(fresh, page, begin, count, C, SPLIT)
    of_G = tl.zeros((C,), tl.float32)
    of_s = tl.zeros((C,), tl.float32)
    of_a = tl.zeros((BLOCK_K,), tl.float32)
    of_f = tl.zeros((BLOCK_K,), tl.float32)
    of_m = tl.zeros((BLOCK_K,), tl.float32)
    for key_block in tl.static_range(0, KEYS, BLOCK_K):
        x = key_block + tl.arange(0, BLOCK_K)
        to_memory = tl.zeros((C, BLOCK_K), tl.float32)
        to_momentum = tl.zeros((C, BLOCK_K), tl.float32)
        to_anchor = tl.zeros((C, BLOCK_K), tl.float32)
        for block in tl.static_range(0, VALUES, BLOCK_V):
            v = block + tl.arange(0, BLOCK_V)
            D = load_rows(errors, row, count, heads, v, VALUES, C)
            grad_M = load_state(grad_memories, index, x, v, KEYS, VALUES)
            to_memory = tl.dot(D, tl.trans(grad_M), to_memory, input_precision=PRECISION)
            grad_S = load_state(grad_momenta, index, x, v, KEYS, VALUES)
            to_momentum = tl.dot(D, tl.trans(grad_S), to_momentum, input_precision=PRECISION)
            A = load_state(anchors, index, x, v, KEYS, VALUES)
            of_D = load_rows(grad_v, row, count, heads, v, VALUES, C)
            to_anchor = tl.dot(of_D, tl.trans(A), to_anchor, input_precision=PRECISION)
            M = load_state(memories, index, x, v, KEYS, VALUES).to(tl.float32)
            S = load_state(momenta, index, x, v, KEYS, VALUES).to(tl.float32)
            of_a += tl.sum(M * grad_M, 1)
            of_f += tl.sum(S * grad_M, 1)
            of_m += tl.sum(S * grad_S, 1)
        K = load_rows(k, row, count, heads, x, KEYS, C)
        of_G += tl.sum(to_memory * K, 1)
        of_s += tl.sum(to_momentum * K, 1)
        grad = G_last[:, None] * to_memory + s_last[:, None] * to_momentum - factor[:, None] * to_anchor
        Q = load_rows(q, row, count, heads, x, KEYS, C)
        grad = tl.dot(rounded, Q, grad, input_precision=PRECISION)
        store_rows(grad_k, row, count, heads, x, grad, KEYS, C)
    tl.store(grad_last + index * (2 * C) + i, of_G)
    tl.store(grad_last + index * (2 * C) + C + i, of_s)
    tl.store(grad_whole + index * 3, tl.sum(of_a, 0))
    tl.store(grad_whole + index * 3 + 1, tl.sum(of_f, 0))
    tl.store(grad_whole + index * 3 + 2, tl.sum(of_m, 0))


@triton.jit
def gate_grad_kernel(
    keep, eta, wrap, gain, momentum_gain, of_memory, of_momentum, products, grad_gain, grad_of_memory, grad_of_momentum,
    grad_last, grad_whole, grad_keep, grad_eta, grad_theta, tokens, heads,
    C: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0)
    begin, row, count, line = chunk_offsets(tl.program_id(1), sequence, wrap, tokens, heads, C, SPLIT)
    index = sequence.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    j = tl.arange(0, C)
    G = tl.load(grad_last + index * (2 * C) + j)
    s = tl.load(grad_last + index * (2 * C) + C + j)
    a = tl.load(grad_whole + index * 3)
    f = tl.load(grad_whole + index * 3 + 1)
    m = tl.load(grad_whole + index * 3 + 2)
    for step in range(count):
        i = count - 1 - step
        token = line + begin + i
        matrix = index * (C * C) + i * C + j
        later = i > 0
        G += tl.load(grad_gain + matrix)
        a += tl.load(grad_of_memory + token)
        f += tl.load(grad_of_momentum + token)
        G_before = tl.load(gain + matrix - C, mask=(j >= 0) & later, other=0.0)
        s_before = tl.load(momentum_gain + matrix - C, mask=(j >= 0) & later, other=0.0)
        a_before = tl.load(of_memory + token - 1, mask=later, other=1.0)
        f_before = tl.load(of_momentum + token - 1, mask=later, other=0.0)
        m_before = tl.load(products + token - 1, mask=later, other=1.0)
        tl.store(grad_keep + token, tl.sum(G * G_before, 0) + f * f_before + a * a_before)
        s += G
        m += f
        tl.store(grad_eta + token, tl.sum(s * s_before, 0) + m * m_before)
        tl.store(grad_theta + token, tl.sum(tl.where(j == i, s, 0.0), 0))
        keep_i = tl.load(keep + token)
        eta_i = tl.load(eta + token)
        G *= keep_i
        a *= keep_i
        f *= keep_i
        s *= eta_i
        m *= eta_i

"""The gated delta rule backward on the GPU: what one program of each kernel does.

W, U, the states and V′ are made anew by the forward kernels; a "pull" is the gradient of what it names.

1. `local_pull_kernel`, one program a chunk: what the outputs of a chunk pull at its V′.
2. `state_pull_kernel`, one program a head and block of values: from the last chunk to the first, all of the pull at V′,
   and at the state that each chunk ends with.
3. `query_pull_kernel` and `key_pull_kernel`, one program a chunk: the pulls at q, at k (less what goes through T), at W
   and, with both, at the sums c of the log decays.
4. `right_pull_kernel`, one program a chunk: R = Tᵀ times the pulls at U and W, which are those at β V and βγ K.
5. `system_pull_kernel`, one program a chunk: since T = (I + A)⁻¹, the pull at A is −(R_V Uᵀ + R_K Wᵀ) below the
   diagonal; with it the pulls at k, v, β and g are whole.

Γ = exp(c_i − c_j) stands wherever a q or k meets a k. So what it pulls at c_i is the product of a token's q or k with
the pull at it, and no sums over pairs are needed. As in the forward kernels, none multiplies with the transpose of what
it has computed itself.
"""

# pyright: reportGeneralTypeIssues=false
# A kernel called by another is, to a type checker, one that never returns.
import triton
import triton.language as tl

from redline.ops.gated_delta_rule.triton_tiles import (
    decays,
    load_columns,
    load_rows,
    load_state,
    pairs,
    place,
    store_rows,
    store_state,
)


@triton.jit
def local_pull_kernel(
    q, k, decay, documents, out_pull, local_pull, tokens, heads,
    KEYS: tl.constexpr, VALUES: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, C: tl.constexpr,
    PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    begin, row, left, line, page = place(tl.program_id(1), tl.program_id(0), tokens, heads, C)
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
        pull = load_rows(out_pull, row, left, heads, x, VALUES, C)
        store_rows(local_pull, row, left, heads, x, tl.dot(rounded, pull, input_precision=PRECISION), VALUES, C)


@triton.jit
def state_pull_kernel(
    q, k, w, decay, documents, out_pull, local_pull, final_pull, correction_pull, state_pulls, initial_pull,
    tokens, heads,
    KEYS: tl.constexpr, VALUES: tl.constexpr, ALL_KEYS: tl.constexpr, BLOCK_V: tl.constexpr, C: tl.constexpr,
    PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`state_pulls` gets the pull at what each chunk ends with; `final_pull` may be none."""
    sequence = tl.program_id(0)
    key = tl.arange(0, ALL_KEYS)
    value = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    chunks = tl.cdiv(tokens, C)
    first = sequence.to(tl.int64) * chunks
    pull = tl.zeros((ALL_KEYS, BLOCK_V), tl.float32)
    if final_pull is not None:
        pull = load_state(final_pull, sequence.to(tl.int64), key, value, KEYS, VALUES)
    for step in range(chunks):
        n = chunks - 1 - step
        begin, row, left, line, page = place(n, sequence, tokens, heads, C)
        rounded = pull.to(k.dtype.element_ty)
        store_state(state_pulls, first + n, key, value, rounded, KEYS, VALUES)
        from_start, to_end, whole = decays(decay, documents, line, page, begin, tokens, C, PACKED)
        K = load_rows(k, row, left, heads, key, KEYS, C)
        local = load_rows(local_pull, row, left, heads, value, VALUES, C)
        correction = local + to_end[:, None] * tl.dot(K, rounded, input_precision=PRECISION)
        store_rows(correction_pull, row, left, heads, value, correction, VALUES, C)
        Q = load_columns(q, row, left, heads, key, KEYS, C)
        out = (from_start[:, None] * load_rows(out_pull, row, left, heads, value, VALUES, C)).to(Q.dtype)
        pull = tl.dot(Q, out, whole * pull, input_precision=PRECISION)
        W = load_columns(w, row, left, heads, key, KEYS, C)
        pull = tl.dot(W, (-correction).to(W.dtype), pull, input_precision=PRECISION)
    store_state(initial_pull, sequence.to(tl.int64), key, value, pull, KEYS, VALUES)


@triton.jit
def query_pull_kernel(
    q, k, decay, documents, states, corrections, out_pull, q_pull, q_decay_pull, tokens, heads,
    KEYS: tl.constexpr, VALUES: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, C: tl.constexpr,
    PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    begin, row, left, line, page = place(tl.program_id(1), tl.program_id(0), tokens, heads, C)
    index = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    i = tl.arange(0, C)
    scores = tl.zeros((C, C), tl.float32)
    for block in tl.static_range(0, VALUES, BLOCK_V):
        v = block + tl.arange(0, BLOCK_V)
        out = load_rows(out_pull, row, left, heads, v, VALUES, C)
        correction = load_rows(corrections, row, left, heads, v, VALUES, C)
        scores = tl.dot(out, tl.trans(correction), scores, input_precision=PRECISION)
    scores *= pairs(decay, documents, line, page, begin, tokens, C, PACKED, False)
    rounded = scores.to(q.dtype.element_ty)
    from_start, to_end, whole = decays(decay, documents, line, page, begin, tokens, C, PACKED)
    of_decay = tl.zeros((C,), tl.float32)
    for key_block in tl.static_range(0, KEYS, BLOCK_K):
        x = key_block + tl.arange(0, BLOCK_K)
        pull = tl.zeros((C, BLOCK_K), tl.float32)
        for block in tl.static_range(0, VALUES, BLOCK_V):
            v = block + tl.arange(0, BLOCK_V)
            out = load_rows(out_pull, row, left, heads, v, VALUES, C)
            S = load_state(states, index, x, v, KEYS, VALUES)
            pull = tl.dot(out, tl.trans(S), pull, input_precision=PRECISION)
        K = load_rows(k, row, left, heads, x, KEYS, C)
        pull = tl.dot(rounded, K, from_start[:, None] * pull, input_precision=PRECISION)
        store_rows(q_pull, row, left, heads, x, pull, KEYS, C)
        of_decay += tl.sum(pull * load_rows(q, row, left, heads, x, KEYS, C), 1)
    tl.store(q_decay_pull + line + begin + i, of_decay, mask=i < left)


@triton.jit
def key_pull_kernel(
    q, k, decay, documents, states, corrections, out_pull, state_pulls, correction_pull,
    k_part_pull, w_pull, k_decay_pull, tokens, heads,
    KEYS: tl.constexpr, VALUES: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, C: tl.constexpr,
    PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    begin, row, left, line, page = place(tl.program_id(1), tl.program_id(0), tokens, heads, C)
    index = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    i = tl.arange(0, C)
    scores = tl.zeros((C, C), tl.float32)
    for block in tl.static_range(0, VALUES, BLOCK_V):
        v = block + tl.arange(0, BLOCK_V)
        out = load_rows(out_pull, row, left, heads, v, VALUES, C)
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
        pull = tl.zeros((C, BLOCK_K), tl.float32)
        of_w = tl.zeros((C, BLOCK_K), tl.float32)
        for block in tl.static_range(0, VALUES, BLOCK_V):
            v = block + tl.arange(0, BLOCK_V)
            S = load_state(states, index, x, v, KEYS, VALUES)
            S_pull = load_state(state_pulls, index, x, v, KEYS, VALUES)
            kept += tl.sum(S.to(tl.float32) * S_pull, 1)
            correction = load_rows(corrections, row, left, heads, v, VALUES, C)
            pull = tl.dot(correction, tl.trans(S_pull), pull, input_precision=PRECISION)
            of_correction = load_rows(correction_pull, row, left, heads, v, VALUES, C)
            of_w = tl.dot(of_correction, tl.trans(S), of_w, input_precision=PRECISION)
        store_rows(w_pull, row, left, heads, x, -of_w, KEYS, C)
        K = load_rows(k, row, left, heads, x, KEYS, C)
        pull *= to_end[:, None]
        of_last += tl.sum(pull * K, 1)
        Q = load_rows(q, row, left, heads, x, KEYS, C)
        pull = tl.dot(rounded, Q, pull, input_precision=PRECISION)
        store_rows(k_part_pull, row, left, heads, x, pull, KEYS, C)
        of_decay -= tl.sum(pull * K, 1)
    last = tl.sum(of_last, 0) + whole * tl.sum(kept, 0)
    of_decay = tl.where(i == min(left, C) - 1, of_decay + last, of_decay)
    tl.store(k_decay_pull + line + begin + i, of_decay, mask=i < left)


@triton.jit
def right_pull_kernel(
    inverse, correction_pull, w_pull, v_right_pull, k_right_pull, tokens, heads,
    KEYS: tl.constexpr, VALUES: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, C: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    begin, row, left, line, page = place(tl.program_id(1), tl.program_id(0), tokens, heads, C)
    i = tl.arange(0, C)
    corner = (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * (C * C)
    T = tl.load(inverse + corner + i[:, None] + i[None, :] * C)
    for block in tl.static_range(0, VALUES, BLOCK_V):
        x = block + tl.arange(0, BLOCK_V)
        pull = load_rows(correction_pull, row, left, heads, x, VALUES, C)
        store_rows(v_right_pull, row, left, heads, x, tl.dot(T, pull, input_precision=PRECISION), VALUES, C)
    for block in tl.static_range(0, KEYS, BLOCK_K):
        x = block + tl.arange(0, BLOCK_K)
        pull = load_rows(w_pull, row, left, heads, x, KEYS, C)
        store_rows(k_right_pull, row, left, heads, x, tl.dot(T, pull, input_precision=PRECISION), KEYS, C)


@triton.jit
def system_pull_kernel(
    k, v, beta, decay, documents, w, u, v_right_pull, k_right_pull, k_part_pull, q_decay_pull, k_decay_pull,
    k_pull, v_pull, g_pull, beta_pull, tokens, heads,
    KEYS: tl.constexpr, VALUES: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, C: tl.constexpr,
    PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    begin, row, left, line, page = place(tl.program_id(1), tl.program_id(0), tokens, heads, C)
    i = tl.arange(0, C)
    factor = tl.load(beta + line + begin + i, mask=i < left, other=0.0)
    from_start, to_end, whole = decays(decay, documents, line, page, begin, tokens, C, PACKED)
    of_beta = tl.zeros((C,), tl.float32)
    below = tl.zeros((C, C), tl.float32)
    above = tl.zeros((C, C), tl.float32)  # its transpose
    for block in tl.static_range(0, VALUES, BLOCK_V):
        x = block + tl.arange(0, BLOCK_V)
        right = load_rows(v_right_pull, row, left, heads, x, VALUES, C)
        U = load_rows(u, row, left, heads, x, VALUES, C)
        below = tl.dot(right, tl.trans(U), below, input_precision=PRECISION)
        above = tl.dot(U, tl.trans(right), above, input_precision=PRECISION)
        store_rows(v_pull, row, left, heads, x, factor[:, None] * right, VALUES, C)
        of_beta += tl.sum(right.to(tl.float32) * load_rows(v, row, left, heads, x, VALUES, C), 1)
    for block in tl.static_range(0, KEYS, BLOCK_K):
        x = block + tl.arange(0, BLOCK_K)
        right = load_rows(k_right_pull, row, left, heads, x, KEYS, C)
        W = load_rows(w, row, left, heads, x, KEYS, C)
        below = tl.dot(right, tl.trans(W), below, input_precision=PRECISION)
        above = tl.dot(W, tl.trans(right), above, input_precision=PRECISION)
    strictly = i[:, None] > i[None, :]
    below *= pairs(decay, documents, line, page, begin, tokens, C, PACKED, False)
    below = tl.where(strictly, -below, 0.0).to(k.dtype.element_ty)
    above *= pairs(decay, documents, line, page, begin, tokens, C, PACKED, True) * factor[None, :]
    above = tl.where(i[:, None] < i[None, :], -above, 0.0).to(k.dtype.element_ty)
    of_decay = tl.load(q_decay_pull + line + begin + i, mask=i < left, other=0.0)
    of_decay += tl.load(k_decay_pull + line + begin + i, mask=i < left, other=0.0)
    for block in tl.static_range(0, KEYS, BLOCK_K):
        x = block + tl.arange(0, BLOCK_K)
        K = load_rows(k, row, left, heads, x, KEYS, C)
        right = load_rows(k_right_pull, row, left, heads, x, KEYS, C)
        # What stands in the system's row of a token pulls at it by its β, what stands in a column by the others'.
        in_row = from_start[:, None] * right + tl.dot(below, K, input_precision=PRECISION)
        in_column = tl.dot(above, K, input_precision=PRECISION)
        of_row = tl.sum(in_row * K, 1)
        of_beta += of_row
        of_decay += factor * of_row - tl.sum(in_column * K, 1)
        pull = load_rows(k_part_pull, row, left, heads, x, KEYS, C) + factor[:, None] * in_row + in_column
        store_rows(k_pull, row, left, heads, x, pull, KEYS, C)
    tl.store(beta_pull + line + begin + i, of_beta, mask=i < left)
    # A token's own log decay is in the sums of all tokens from it on.
    of_g = tl.sum(tl.where(i[:, None] >= i[None, :], of_decay[:, None], 0.0), 0)
    tl.store(g_pull + line + begin + i, of_g, mask=i < left)

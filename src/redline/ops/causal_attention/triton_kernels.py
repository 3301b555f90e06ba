"""The kernels of causal attention: the mix, and the gradients of queries, and of keys and values, each by programs of
their own.

Exponents are of 2, so that what is kept of a softmax is the logarithm of its sum to base 2. Tokens of a tile that all
see each other need no mask; tiles at the ends of what is seen do. No two programs add to the same number, and each adds
in one order, so that the same input gives the same bits.

T: tokens, H: heads of queries, G: heads of keys, D: width of a head; M queries and N keys of a tile.
"""

import triton
import triton.language as tl


@triton.jit
def _tile(x, first, tokens, token_stride, D: tl.constexpr, ROWS: tl.constexpr):
    """Rows of a head from `first` on, zeros beyond the last token."""
    row = first + tl.arange(0, ROWS)
    channel = tl.arange(0, D)
    place = x + row.to(tl.int64)[:, None] * token_stride + channel[None, :]
    return tl.load(place, mask=(row < tokens)[:, None], other=0.0)


@triton.jit
def _put(x, values, first, tokens, token_stride, D: tl.constexpr, ROWS: tl.constexpr):
    row = first + tl.arange(0, ROWS)
    channel = tl.arange(0, D)
    place = x + row.to(tl.int64)[:, None] * token_stride + channel[None, :]
    tl.store(place, values.to(x.dtype.element_ty), mask=(row < tokens)[:, None])


@triton.jit
def _keys_seen(lowest, start, tokens, M: tl.constexpr, N: tl.constexpr):
    """Where the keys begin that the first of these queries sees, those that all of them see, those that are not before
    all of them, and where they end."""
    end = tl.minimum(start + M, tokens)
    begin = tl.maximum(tl.load(lowest + start), 0) // N * N
    common = tl.minimum(tl.cdiv(tl.load(lowest + end - 1), N) * N, start // N * N)
    common = tl.maximum(common, begin)
    inner = tl.maximum(start // N * N, common)
    return begin, common, inner, end


@triton.jit
def _mix_keys(
    total, greatest, sums, q_MD, low_M, k, v, begin, end, row, tokens, k_stride, v_stride, scale,
    D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    for first in range(begin, end, N):
        k_ND = _tile(k, first, tokens, k_stride, D, N)
        v_ND = _tile(v, first, tokens, v_stride, D, N)
        scores = tl.dot(q_MD, tl.trans(k_ND), input_precision=PRECISION)
        if MASKED:
            key = first + tl.arange(0, N)
            sees = (key[None, :] <= row[:, None]) & (key[None, :] >= low_M[:, None])
            scores = tl.where(sees, scores, float("-inf"))
        higher = tl.maximum(greatest, tl.max(scores, 1) * scale)
        # Of a token that sees nothing of this tile and nothing before it: -inf less -inf is no number.
        base = tl.where(higher == float("-inf"), 0.0, higher) if MASKED else higher
        shares = tl.exp2(scores * scale - base[:, None])
        shrink = tl.exp2(greatest - base)
        sums = sums * shrink + tl.sum(shares, 1)
        total = total * shrink[:, None]
        total = tl.dot(shares.to(v_ND.dtype), v_ND, total, input_precision=PRECISION)
        greatest = higher
    return total, greatest, sums


@triton.jit
def causal_attention_forward_kernel(
    q, k, v, out, logs, lowest, tokens, scale,
    q_token, q_head, k_token, k_head, v_token, v_head,
    HEADS: tl.constexpr, SHARED: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """`scale` takes products to exponents of 2."""
    # The last tokens of a text see the most: they begin first.
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * M
    head = tl.program_id(1)
    q += head.to(tl.int64) * q_head
    k += (head // SHARED).to(tl.int64) * k_head
    v += (head // SHARED).to(tl.int64) * v_head
    row = start + tl.arange(0, M)
    low_M = tl.load(lowest + row, mask=row < tokens, other=tokens)
    q_MD = _tile(q, start, tokens, q_token, D, M)
    total = tl.zeros((M, D), tl.float32)
    greatest = tl.full((M,), float("-inf"), tl.float32)
    sums = tl.zeros((M,), tl.float32)
    begin, common, inner, end = _keys_seen(lowest, start, tokens, M, N)
    total, greatest, sums = _mix_keys(
        total, greatest, sums, q_MD, low_M, k, v, begin, common, row, tokens, k_token, v_token, scale,
        D, M, N, True, PRECISION,
    )  # fmt: skip
    total, greatest, sums = _mix_keys(
        total, greatest, sums, q_MD, low_M, k, v, common, inner, row, tokens, k_token, v_token, scale,
        D, M, N, False, PRECISION,
    )  # fmt: skip
    total, greatest, sums = _mix_keys(
        total, greatest, sums, q_MD, low_M, k, v, inner, end, row, tokens, k_token, v_token, scale,
        D, M, N, True, PRECISION,
    )  # fmt: skip
    _put(out + head * D, total / sums[:, None], start, tokens, HEADS * D, D, M)
    tl.store(logs + head.to(tl.int64) * tokens + row, greatest + tl.log2(sums), mask=row < tokens)


@triton.jit
def causal_attention_dots_kernel(
    out, pull, dots, tokens, pull_token, pull_head, HEADS: tl.constexpr, D: tl.constexpr, M: tl.constexpr
):
    """What each token got times what pulls at it: the share of the softmax's sum in all of its gradients."""
    start, head = tl.program_id(0) * M, tl.program_id(1)
    mixed = _tile(out + head * D, start, tokens, HEADS * D, D, M).to(tl.float32)
    pulled = _tile(pull + head.to(tl.int64) * pull_head, start, tokens, pull_token, D, M).to(tl.float32)
    row = start + tl.arange(0, M)
    tl.store(dots + head.to(tl.int64) * tokens + row, tl.sum(mixed * pulled, 1), mask=row < tokens)


@triton.jit
def _pull_queries(
    total, q_MD, pull_MD, log_M, dot_M, low_M, k, v, begin, end, row, tokens, k_stride, v_stride, scale,
    D: tl.constexpr, N: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    for first in range(begin, end, N):
        k_ND = _tile(k, first, tokens, k_stride, D, N)
        v_ND = _tile(v, first, tokens, v_stride, D, N)
        exponents = tl.dot(q_MD, tl.trans(k_ND), input_precision=PRECISION) * scale - log_M[:, None]
        if MASKED:
            key = first + tl.arange(0, N)
            sees = (key[None, :] <= row[:, None]) & (key[None, :] >= low_M[:, None])
            exponents = tl.where(sees, exponents, float("-inf"))
        shares = tl.exp2(exponents)
        pulls = shares * (tl.dot(pull_MD, tl.trans(v_ND), input_precision=PRECISION) - dot_M[:, None])
        total = tl.dot(pulls.to(k_ND.dtype), k_ND, total, input_precision=PRECISION)
    return total


@triton.jit
def causal_attention_queries_kernel(
    q, k, v, pull, logs, dots, q_pull, lowest, tokens, scale, size,
    q_token, q_head, k_token, k_head, v_token, v_head, pull_token, pull_head,
    HEADS: tl.constexpr, SHARED: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * M
    head = tl.program_id(1)
    q += head.to(tl.int64) * q_head
    k += (head // SHARED).to(tl.int64) * k_head
    v += (head // SHARED).to(tl.int64) * v_head
    pull += head.to(tl.int64) * pull_head
    row = start + tl.arange(0, M)
    inside = row < tokens
    low_M = tl.load(lowest + row, mask=inside, other=tokens)
    log_M = tl.load(logs + head.to(tl.int64) * tokens + row, mask=inside, other=0.0)
    dot_M = tl.load(dots + head.to(tl.int64) * tokens + row, mask=inside, other=0.0)
    q_MD = _tile(q, start, tokens, q_token, D, M)
    pull_MD = _tile(pull, start, tokens, pull_token, D, M)
    total = tl.zeros((M, D), tl.float32)
    begin, common, inner, end = _keys_seen(lowest, start, tokens, M, N)
    total = _pull_queries(
        total, q_MD, pull_MD, log_M, dot_M, low_M, k, v, begin, common, row, tokens, k_token, v_token, scale,
        D, N, True, PRECISION,
    )  # fmt: skip
    total = _pull_queries(
        total, q_MD, pull_MD, log_M, dot_M, low_M, k, v, common, inner, row, tokens, k_token, v_token, scale,
        D, N, False, PRECISION,
    )  # fmt: skip
    total = _pull_queries(
        total, q_MD, pull_MD, log_M, dot_M, low_M, k, v, inner, end, row, tokens, k_token, v_token, scale,
        D, N, True, PRECISION,
    )  # fmt: skip
    _put(q_pull + head * D, total * size, start, tokens, HEADS * D, D, M)


@triton.jit
def _pull_keys(
    k_total, v_total, k_ND, v_ND, key, q, pull, logs, dots, lowest, begin, end, tokens, q_stride, pull_stride, scale,
    D: tl.constexpr, M: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    for first in range(begin, end, M):
        q_MD = _tile(q, first, tokens, q_stride, D, M)
        pull_MD = _tile(pull, first, tokens, pull_stride, D, M)
        row = first + tl.arange(0, M)
        log_M = tl.load(logs + row, mask=row < tokens, other=0.0)
        dot_M = tl.load(dots + row, mask=row < tokens, other=0.0)
        exponents = tl.dot(k_ND, tl.trans(q_MD), input_precision=PRECISION) * scale - log_M[None, :]
        if MASKED:
            low_M = tl.load(lowest + row, mask=row < tokens, other=tokens)
            sees = (key[:, None] <= row[None, :]) & (key[:, None] >= low_M[None, :])
            exponents = tl.where(sees, exponents, float("-inf"))
        shares = tl.exp2(exponents)
        v_total = tl.dot(shares.to(pull_MD.dtype), pull_MD, v_total, input_precision=PRECISION)
        pulls = shares * (tl.dot(v_ND, tl.trans(pull_MD), input_precision=PRECISION) - dot_M[None, :])
        k_total = tl.dot(pulls.to(q_MD.dtype), q_MD, k_total, input_precision=PRECISION)
    return k_total, v_total


@triton.jit
def causal_attention_keys_kernel(
    q, k, v, pull, logs, dots, k_pull, v_pull, lowest, highest, tokens, scale, size,
    q_token, q_head, k_token, k_head, v_token, v_head, pull_token, pull_head,
    HEADS: tl.constexpr, SHARED: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Keys and values of a tile, pulled at by all queries that see them, of all heads that share them in turn."""
    start, group = tl.program_id(0) * N, tl.program_id(1)
    k += group.to(tl.int64) * k_head
    v += group.to(tl.int64) * v_head
    key = start + tl.arange(0, N)
    k_ND = _tile(k, start, tokens, k_token, D, N)
    v_ND = _tile(v, start, tokens, v_token, D, N)
    k_total = tl.zeros((N, D), tl.float32)
    v_total = tl.zeros((N, D), tl.float32)
    # The last token that sees the last of these keys, and the last that sees all of them.
    last = tl.minimum(start + N, tokens) - 1
    end = tl.load(highest + last) + 1
    begin = start // M * M
    inner = tl.minimum(tl.cdiv(start + N, M) * M, end)
    common = tl.maximum((tl.load(highest + start) + 1) // M * M, inner)
    for share in range(SHARED):
        head = (group * SHARED + share).to(tl.int64)
        of_q, of_pull = q + head * q_head, pull + head * pull_head
        of_logs, of_dots = logs + head * tokens, dots + head * tokens
        k_total, v_total = _pull_keys(
            k_total, v_total, k_ND, v_ND, key, of_q, of_pull, of_logs, of_dots, lowest, begin, inner, tokens,
            q_token, pull_token, scale, D, M, True, PRECISION,
        )  # fmt: skip
        k_total, v_total = _pull_keys(
            k_total, v_total, k_ND, v_ND, key, of_q, of_pull, of_logs, of_dots, lowest, inner, common, tokens,
            q_token, pull_token, scale, D, M, False, PRECISION,
        )  # fmt: skip
        k_total, v_total = _pull_keys(
            k_total, v_total, k_ND, v_ND, key, of_q, of_pull, of_logs, of_dots, lowest, common, end, tokens,
            q_token, pull_token, scale, D, M, True, PRECISION,
        )  # fmt: skip
    _put(k_pull + group * D, k_total * size, start, tokens, HEADS // SHARED * D, D, N)
    _put(v_pull + group * D, v_total, start, tokens, HEADS // SHARED * D, D, N)

"""Triton kernels of causal attention: forward, the gradients of queries, and the gradients of keys and values.

Softmax uses base 2: `logs` is the base-2 logarithm of each denominator. Tiles in which every query sees every key are
computed without a mask, and tiles at the ends of a span with a mask. No two programs write the same element, and each
program adds in a fixed order, so results are deterministic.

Far keys are processed after the near keys, so that every softmax has at least one term by then. Their scores use
separate queries and a bias, which is added before scaling. A query sees the far keys from `first` up to, but not
including, `lowest`. Without far keys the arguments `far_q`, `far_k`, `bias` and `first` are None.

T: tokens, H: query heads, G: key heads, D: head dimension, M: queries per tile, N: keys per tile.
"""

import triton
import triton.language as tl


@triton.jit
def _load_tile(x, first, tokens, token_stride, D: tl.constexpr, ROWS: tl.constexpr):
    """Loads rows of one head starting at `first`, with zeros beyond the last token."""
    row = first + tl.arange(0, ROWS)
    channel = tl.arange(0, D)
    offset = x + row.to(tl.int64)[:, None] * token_stride + channel[None, :]
    return tl.load(offset, mask=(row < tokens)[:, None], other=0.0)


@triton.jit
def _store_tile(x, values, first, tokens, token_stride, D: tl.constexpr, ROWS: tl.constexpr):
    row = first + tl.arange(0, ROWS)
    channel = tl.arange(0, D)
    offset = x + row.to(tl.int64)[:, None] * token_stride + channel[None, :]
    tl.store(offset, values.to(x.dtype.element_ty), mask=(row < tokens)[:, None])


@triton.jit
def _keys_seen(lowest, start, tokens, M: tl.constexpr, N: tl.constexpr):
    """Returns the bounds of the keys that the queries of a tile see: `begin`, `common`, `inner` and `end`.

    All queries see the keys from `common` to `inner`. Only some queries see the keys before and after these.
    """
    end = tl.minimum(start + M, tokens)
    begin = tl.maximum(tl.load(lowest + start), 0) // N * N
    common = tl.minimum(tl.cdiv(tl.load(lowest + end - 1), N) * N, start // N * N)
    common = tl.maximum(common, begin)
    inner = tl.maximum(start // N * N, common)
    return begin, common, inner, end


@triton.jit
def _far_keys_seen(first, lowest, start, tokens, M: tl.constexpr, N: tl.constexpr):
    """Returns the bounds of `_keys_seen` for far keys."""
    last = tl.minimum(start + M, tokens) - 1
    end = tl.load(lowest + last)
    begin = tl.maximum(tl.load(first + start), 0) // N * N
    inner = tl.load(lowest + start) // N * N
    common = tl.maximum(tl.minimum(tl.cdiv(tl.load(first + last), N) * N, inner), begin)
    return begin, common, tl.maximum(inner, common), end


@triton.jit
def _attend_keys(
    total, maximum, sums, q_MD, low_M, high_M, k, v, bias, begin, end, tokens, k_stride, v_stride, scale,
    D: tl.constexpr, N: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    for first in range(begin, end, N):
        k_ND = _load_tile(k, first, tokens, k_stride, D, N)
        v_ND = _load_tile(v, first, tokens, v_stride, D, N)
        scores = tl.dot(q_MD, tl.trans(k_ND), input_precision=PRECISION)
        key = first + tl.arange(0, N)
        if bias is not None:
            scores = scores + tl.load(bias + key, mask=key < tokens, other=0.0)[None, :]
        if MASKED:
            sees = (key[None, :] <= high_M[:, None]) & (key[None, :] >= low_M[:, None])
            scores = tl.where(sees, scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1) * scale)
        # A query that has seen no key yet has a maximum of -inf, and -inf - -inf would be NaN.
        base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum) if MASKED else new_maximum
        weights = tl.exp2(scores * scale - base[:, None])
        decay = tl.exp2(maximum - base)
        sums = sums * decay + tl.sum(weights, 1)
        total = total * decay[:, None]
        total = tl.dot(weights.to(v_ND.dtype), v_ND, total, input_precision=PRECISION)
        maximum = new_maximum
    return total, maximum, sums


@triton.jit
def _attend_span(
    total, maximum, sums, q_MD, low_M, high_M, k, v, bias, begin, common, inner, end, tokens, k_stride, v_stride,
    scale, D: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Accumulates the softmax of a query tile over its keys. Masks only keys that some of the queries do not see."""
    total, maximum, sums = _attend_keys(
        total, maximum, sums, q_MD, low_M, high_M, k, v, bias, begin, common, tokens, k_stride, v_stride, scale,
        D, N, True, PRECISION,
    )  # fmt: skip
    total, maximum, sums = _attend_keys(
        total, maximum, sums, q_MD, low_M, high_M, k, v, bias, common, inner, tokens, k_stride, v_stride, scale,
        D, N, False, PRECISION,
    )  # fmt: skip
    return _attend_keys(
        total, maximum, sums, q_MD, low_M, high_M, k, v, bias, inner, end, tokens, k_stride, v_stride, scale,
        D, N, True, PRECISION,
    )  # fmt: skip


@triton.jit
def causal_attention_forward_kernel(
    q, k, v, out, logs, lowest, far_q, far_k, bias, first, tokens, scale,
    q_token, q_head, k_token, k_head, v_token, v_head, far_q_token, far_q_head, far_k_token, far_k_head,
    HEADS: tl.constexpr, SHARED: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes the outputs of a query tile. `scale` is 1 / √D / ln 2, which makes the scores base-2 exponents."""
    # The last tokens of a sequence see the most keys, so they are scheduled first.
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * M
    head = tl.program_id(1)
    q += head.to(tl.int64) * q_head
    k += (head // SHARED).to(tl.int64) * k_head
    v += (head // SHARED).to(tl.int64) * v_head
    row = start + tl.arange(0, M)
    low_M = tl.load(lowest + row, mask=row < tokens, other=tokens)
    q_MD = _load_tile(q, start, tokens, q_token, D, M)
    total = tl.zeros((M, D), tl.float32)
    maximum = tl.full((M,), float("-inf"), tl.float32)
    sums = tl.zeros((M,), tl.float32)
    begin, common, inner, end = _keys_seen(lowest, start, tokens, M, N)
    total, maximum, sums = _attend_span(
        total, maximum, sums, q_MD, low_M, row, k, v, None, begin, common, inner, end, tokens, k_token, v_token,
        scale, D, N, PRECISION,
    )  # fmt: skip
    if far_q is not None:
        far_q += head.to(tl.int64) * far_q_head
        far_k += (head // SHARED).to(tl.int64) * far_k_head
        first_M = tl.load(first + row, mask=row < tokens, other=tokens)
        q_MD = _load_tile(far_q, start, tokens, far_q_token, D, M)
        begin, common, inner, end = _far_keys_seen(first, lowest, start, tokens, M, N)
        total, maximum, sums = _attend_span(
            total, maximum, sums, q_MD, first_M, low_M - 1, far_k, v, bias, begin, common, inner, end, tokens,
            far_k_token, v_token, scale, D, N, PRECISION,
        )  # fmt: skip
    _store_tile(out + head * D, total / sums[:, None], start, tokens, HEADS * D, D, M)
    tl.store(logs + head.to(tl.int64) * tokens + row, maximum + tl.log2(sums), mask=row < tokens)


@triton.jit
def causal_attention_dots_kernel(
    out, grad, dots, tokens, grad_token, grad_head, HEADS: tl.constexpr, D: tl.constexpr, M: tl.constexpr
):
    """Computes the dot product of each output with its gradient, which the softmax gradient subtracts."""
    start, head = tl.program_id(0) * M, tl.program_id(1)
    mixed = _load_tile(out + head * D, start, tokens, HEADS * D, D, M).to(tl.float32)
    grad_value = _load_tile(grad + head.to(tl.int64) * grad_head, start, tokens, grad_token, D, M).to(tl.float32)
    row = start + tl.arange(0, M)
    tl.store(dots + head.to(tl.int64) * tokens + row, tl.sum(mixed * grad_value, 1), mask=row < tokens)


@triton.jit
def _grad_queries(
    total, q_MD, grad_MD, log_M, dot_M, low_M, high_M, k, v, bias, begin, end, tokens, k_stride, v_stride, scale,
    D: tl.constexpr, N: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    for first in range(begin, end, N):
        k_ND = _load_tile(k, first, tokens, k_stride, D, N)
        v_ND = _load_tile(v, first, tokens, v_stride, D, N)
        scores = tl.dot(q_MD, tl.trans(k_ND), input_precision=PRECISION)
        key = first + tl.arange(0, N)
        if bias is not None:
            scores = scores + tl.load(bias + key, mask=key < tokens, other=0.0)[None, :]
        exponents = scores * scale - log_M[:, None]
        if MASKED:
            sees = (key[None, :] <= high_M[:, None]) & (key[None, :] >= low_M[:, None])
            exponents = tl.where(sees, exponents, float("-inf"))
        weights = tl.exp2(exponents)
        grads = weights * (tl.dot(grad_MD, tl.trans(v_ND), input_precision=PRECISION) - dot_M[:, None])
        total = tl.dot(grads.to(k_ND.dtype), k_ND, total, input_precision=PRECISION)
    return total


@triton.jit
def _grad_query_span(
    q_MD, grad_MD, log_M, dot_M, low_M, high_M, k, v, bias, begin, common, inner, end, tokens, k_stride, v_stride,
    scale, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    total = tl.zeros((M, D), tl.float32)
    total = _grad_queries(
        total, q_MD, grad_MD, log_M, dot_M, low_M, high_M, k, v, bias, begin, common, tokens, k_stride, v_stride,
        scale, D, N, True, PRECISION,
    )  # fmt: skip
    total = _grad_queries(
        total, q_MD, grad_MD, log_M, dot_M, low_M, high_M, k, v, bias, common, inner, tokens, k_stride, v_stride,
        scale, D, N, False, PRECISION,
    )  # fmt: skip
    return _grad_queries(
        total, q_MD, grad_MD, log_M, dot_M, low_M, high_M, k, v, bias, inner, end, tokens, k_stride, v_stride,
        scale, D, N, True, PRECISION,
    )  # fmt: skip


@triton.jit
def causal_attention_queries_kernel(
    q, k, v, grad, logs, dots, grad_q, lowest, far_q, far_k, bias, first, grad_far_q, tokens, scale, size,
    q_token, q_head, k_token, k_head, v_token, v_head, grad_token, grad_head,
    far_q_token, far_q_head, far_k_token, far_k_head,
    HEADS: tl.constexpr, SHARED: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * M
    head = tl.program_id(1)
    q += head.to(tl.int64) * q_head
    k += (head // SHARED).to(tl.int64) * k_head
    v += (head // SHARED).to(tl.int64) * v_head
    grad += head.to(tl.int64) * grad_head
    row = start + tl.arange(0, M)
    inside = row < tokens
    low_M = tl.load(lowest + row, mask=inside, other=tokens)
    log_M = tl.load(logs + head.to(tl.int64) * tokens + row, mask=inside, other=0.0)
    dot_M = tl.load(dots + head.to(tl.int64) * tokens + row, mask=inside, other=0.0)
    q_MD = _load_tile(q, start, tokens, q_token, D, M)
    grad_MD = _load_tile(grad, start, tokens, grad_token, D, M)
    begin, common, inner, end = _keys_seen(lowest, start, tokens, M, N)
    total = _grad_query_span(
        q_MD, grad_MD, log_M, dot_M, low_M, row, k, v, None, begin, common, inner, end, tokens, k_token, v_token,
        scale, D, M, N, PRECISION,
    )  # fmt: skip
    _store_tile(grad_q + head * D, total * size, start, tokens, HEADS * D, D, M)
    if far_q is not None:
        far_q += head.to(tl.int64) * far_q_head
        far_k += (head // SHARED).to(tl.int64) * far_k_head
        first_M = tl.load(first + row, mask=inside, other=tokens)
        q_MD = _load_tile(far_q, start, tokens, far_q_token, D, M)
        begin, common, inner, end = _far_keys_seen(first, lowest, start, tokens, M, N)
        total = _grad_query_span(
            q_MD, grad_MD, log_M, dot_M, first_M, low_M - 1, far_k, v, bias, begin, common, inner, end, tokens,
            far_k_token, v_token, scale, D, M, N, PRECISION,
        )  # fmt: skip
        _store_tile(grad_far_q + head * D, total * size, start, tokens, HEADS * D, D, M)


@triton.jit
def _grad_keys(
    k_total, v_total, bias_total, k_ND, v_ND, bias_N, key, q, grad, logs, dots, low, beyond, begin, end, tokens,
    q_stride, grad_stride, scale,
    D: tl.constexpr, M: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds the contributions of the queries from `begin` to `end` to the gradients of a key tile.

    A query sees the keys from `low` up to, but not including, `beyond`. If `beyond` is None, it sees keys up to itself.
    """
    for first in range(begin, end, M):
        q_MD = _load_tile(q, first, tokens, q_stride, D, M)
        grad_MD = _load_tile(grad, first, tokens, grad_stride, D, M)
        row = first + tl.arange(0, M)
        log_M = tl.load(logs + row, mask=row < tokens, other=0.0)
        dot_M = tl.load(dots + row, mask=row < tokens, other=0.0)
        scores = tl.dot(k_ND, tl.trans(q_MD), input_precision=PRECISION)
        if bias_N is not None:
            scores += bias_N[:, None]
        exponents = scores * scale - log_M[None, :]
        if MASKED:
            low_M = tl.load(low + row, mask=row < tokens, other=tokens)
            if beyond is None:
                sees = (key[:, None] <= row[None, :]) & (key[:, None] >= low_M[None, :])
            else:
                beyond_M = tl.load(beyond + row, mask=row < tokens, other=0)
                sees = (key[:, None] < beyond_M[None, :]) & (key[:, None] >= low_M[None, :])
            exponents = tl.where(sees, exponents, float("-inf"))
        weights = tl.exp2(exponents)
        v_total = tl.dot(weights.to(grad_MD.dtype), grad_MD, v_total, input_precision=PRECISION)
        grads = weights * (tl.dot(v_ND, tl.trans(grad_MD), input_precision=PRECISION) - dot_M[None, :])
        if bias_N is not None:
            bias_total += tl.sum(grads, 1)
        k_total = tl.dot(grads.to(q_MD.dtype), q_MD, k_total, input_precision=PRECISION)
    return k_total, v_total, bias_total


@triton.jit
def _grad_key_span(
    v_total, k_ND, v_ND, bias_N, key, q, grad, logs, dots, low, beyond, begin, inner, common, end, group, tokens,
    q_token, q_head, grad_token, grad_head, scale,
    SHARED: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sums a key tile's gradients over all queries and heads that see the tile. Masks only partial tiles."""
    k_total = tl.zeros((N, D), tl.float32)
    bias_total = tl.zeros((N,), tl.float32)
    for share in range(SHARED):
        head = (group * SHARED + share).to(tl.int64)
        of_q, grad_of = q + head * q_head, grad + head * grad_head
        of_logs, of_dots = logs + head * tokens, dots + head * tokens
        k_total, v_total, bias_total = _grad_keys(
            k_total, v_total, bias_total, k_ND, v_ND, bias_N, key, of_q, grad_of, of_logs, of_dots, low, beyond,
            begin, inner, tokens, q_token, grad_token, scale, D, M, True, PRECISION,
        )  # fmt: skip
        k_total, v_total, bias_total = _grad_keys(
            k_total, v_total, bias_total, k_ND, v_ND, bias_N, key, of_q, grad_of, of_logs, of_dots, low, beyond,
            inner, common, tokens, q_token, grad_token, scale, D, M, False, PRECISION,
        )  # fmt: skip
        k_total, v_total, bias_total = _grad_keys(
            k_total, v_total, bias_total, k_ND, v_ND, bias_N, key, of_q, grad_of, of_logs, of_dots, low, beyond,
            common, end, tokens, q_token, grad_token, scale, D, M, True, PRECISION,
        )  # fmt: skip
    return k_total, v_total, bias_total


@triton.jit
def causal_attention_keys_kernel(
    q, k, v, grad, logs, dots, grad_k, grad_v, lowest, highest,
    far_q, far_k, bias, first, final, grad_far_k, grad_bias, tokens, scale, size,
    q_token, q_head, k_token, k_head, v_token, v_head, grad_token, grad_head,
    far_q_token, far_q_head, far_k_token, far_k_head,
    HEADS: tl.constexpr, SHARED: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes the gradients of one tile of keys and values over all queries that see them.

    For each key, `highest` holds the last query that sees it as a near key, and `final` the last query that sees it as
    a far key. `grad_bias` receives one partial sum per group of heads.
    """
    start, group = tl.program_id(0) * N, tl.program_id(1)
    k += group.to(tl.int64) * k_head
    v += group.to(tl.int64) * v_head
    key = start + tl.arange(0, N)
    k_ND = _load_tile(k, start, tokens, k_token, D, N)
    v_ND = _load_tile(v, start, tokens, v_token, D, N)
    v_total = tl.zeros((N, D), tl.float32)
    # Queries from `inner` to `common` see all of these keys, and queries from `end` on see none of them.
    last = tl.minimum(start + N, tokens) - 1
    end = tl.load(highest + last) + 1
    begin = start // M * M
    inner = tl.minimum(tl.cdiv(start + N, M) * M, end)
    common = tl.maximum((tl.load(highest + start) + 1) // M * M, inner)
    k_total, v_total, _ = _grad_key_span(
        v_total, k_ND, v_ND, None, key, q, grad, logs, dots, lowest, None, begin, inner, common, end, group, tokens,
        q_token, q_head, grad_token, grad_head, scale, SHARED, D, M, N, PRECISION,
    )  # fmt: skip
    _store_tile(grad_k + group * D, k_total * size, start, tokens, HEADS // SHARED * D, D, N)
    if far_q is not None:
        k_ND = _load_tile(far_k + group.to(tl.int64) * far_k_head, start, tokens, far_k_token, D, N)
        bias_N = tl.load(bias + key, mask=key < tokens, other=0.0)
        # A key is a far key of the queries whose near span begins after it.
        end = tl.load(final + last) + 1
        begin = (tl.load(highest + start) + 1) // M * M
        inner = tl.minimum(tl.cdiv(tl.load(highest + last) + 1, M) * M, end)
        common = tl.maximum((tl.load(final + start) + 1) // M * M, inner)
        k_total, v_total, bias_total = _grad_key_span(
            v_total, k_ND, v_ND, bias_N, key, far_q, grad, logs, dots, first, lowest, begin, inner, common, end, group,
            tokens, far_q_token, far_q_head, grad_token, grad_head, scale, SHARED, D, M, N, PRECISION,
        )  # fmt: skip
        _store_tile(grad_far_k + group * D, k_total * size, start, tokens, HEADS // SHARED * D, D, N)
        tl.store(grad_bias + group.to(tl.int64) * tokens + key, bias_total * size, mask=key < tokens)
    _store_tile(grad_v + group * D, v_total, start, tokens, HEADS // SHARED * D, D, N)

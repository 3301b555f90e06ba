"""The kernels of causal attention: the mix, and the gradients of queries, and of keys and values, each by programs of
their own.

Exponents are of 2, so that what is kept of a softmax is the logarithm of its sum to base 2. Tokens of a tile that all
see each other need no mask; tiles at the ends of what is seen do. No two programs add to the same number, and each adds
in one order, so that the same input gives the same bits.

What is far comes second in every program, when every query has seen itself. It has queries, keys and a bias of its own,
which is added before products are scaled; `first` is the first token that a query sees there, `lowest` the first that
it does not. Where nothing is, all of these are None.

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
def _far_keys_seen(first, lowest, start, tokens, M: tl.constexpr, N: tl.constexpr):
    """The same of those that are far."""
    last = tl.minimum(start + M, tokens) - 1
    end = tl.load(lowest + last)
    begin = tl.maximum(tl.load(first + start), 0) // N * N
    inner = tl.load(lowest + start) // N * N
    common = tl.maximum(tl.minimum(tl.cdiv(tl.load(first + last), N) * N, inner), begin)
    return begin, common, tl.maximum(inner, common), end


@triton.jit
def _mix_keys(
    total, greatest, sums, q_MD, low_M, high_M, k, v, bias, begin, end, tokens, k_stride, v_stride, scale,
    D: tl.constexpr, N: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    for first in range(begin, end, N):
        k_ND = _tile(k, first, tokens, k_stride, D, N)
        v_ND = _tile(v, first, tokens, v_stride, D, N)
        scores = tl.dot(q_MD, tl.trans(k_ND), input_precision=PRECISION)
        key = first + tl.arange(0, N)
        if bias is not None:
            scores = scores + tl.load(bias + key, mask=key < tokens, other=0.0)[None, :]
        if MASKED:
            sees = (key[None, :] <= high_M[:, None]) & (key[None, :] >= low_M[:, None])
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
def _mix_stretch(
    total, greatest, sums, q_MD, low_M, high_M, k, v, bias, begin, common, inner, end, tokens, k_stride, v_stride,
    scale, D: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The keys that some of the queries see, those that all see, and again some."""
    total, greatest, sums = _mix_keys(  # pyright: ignore[reportGeneralTypeIssues]
        total, greatest, sums, q_MD, low_M, high_M, k, v, bias, begin, common, tokens, k_stride, v_stride, scale,
        D, N, True, PRECISION,
    )  # fmt: skip
    total, greatest, sums = _mix_keys(
        total, greatest, sums, q_MD, low_M, high_M, k, v, bias, common, inner, tokens, k_stride, v_stride, scale,
        D, N, False, PRECISION,
    )  # fmt: skip
    return _mix_keys(
        total, greatest, sums, q_MD, low_M, high_M, k, v, bias, inner, end, tokens, k_stride, v_stride, scale,
        D, N, True, PRECISION,
    )  # fmt: skip


@triton.jit
def causal_attention_forward_kernel(
    q, k, v, out, logs, lowest, far_q, far_k, bias, first, tokens, scale,
    q_token, q_head, k_token, k_head, v_token, v_head, far_q_token, far_q_head, far_k_token, far_k_head,
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
    total, greatest, sums = _mix_stretch(
        total, greatest, sums, q_MD, low_M, row, k, v, None, begin, common, inner, end, tokens, k_token, v_token,
        scale, D, N, PRECISION,
    )  # fmt: skip
    if far_q is not None:
        far_q += head.to(tl.int64) * far_q_head
        far_k += (head // SHARED).to(tl.int64) * far_k_head
        first_M = tl.load(first + row, mask=row < tokens, other=tokens)
        q_MD = _tile(far_q, start, tokens, far_q_token, D, M)
        begin, common, inner, end = _far_keys_seen(first, lowest, start, tokens, M, N)
        total, greatest, sums = _mix_stretch(
            total, greatest, sums, q_MD, first_M, low_M - 1, far_k, v, bias, begin, common, inner, end, tokens,
            far_k_token, v_token, scale, D, N, PRECISION,
        )  # fmt: skip
    _put(out + head * D, total / sums[:, None], start, tokens, HEADS * D, D, M)
    tl.store(logs + head.to(tl.int64) * tokens + row, greatest + tl.log2(sums), mask=row < tokens)


@triton.jit
def causal_attention_dots_kernel(
    out, grad, dots, tokens, grad_token, grad_head, HEADS: tl.constexpr, D: tl.constexpr, M: tl.constexpr
):
    """What each token got times what grads at it: the share of the softmax's sum in all of its gradients."""
    start, head = tl.program_id(0) * M, tl.program_id(1)
    mixed = _tile(out + head * D, start, tokens, HEADS * D, D, M).to(tl.float32)
    grad_value = _tile(grad + head.to(tl.int64) * grad_head, start, tokens, grad_token, D, M).to(tl.float32)
    row = start + tl.arange(0, M)
    tl.store(dots + head.to(tl.int64) * tokens + row, tl.sum(mixed * grad_value, 1), mask=row < tokens)


@triton.jit
def _grad_queries(
    total, q_MD, grad_MD, log_M, dot_M, low_M, high_M, k, v, bias, begin, end, tokens, k_stride, v_stride, scale,
    D: tl.constexpr, N: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    for first in range(begin, end, N):
        k_ND = _tile(k, first, tokens, k_stride, D, N)
        v_ND = _tile(v, first, tokens, v_stride, D, N)
        scores = tl.dot(q_MD, tl.trans(k_ND), input_precision=PRECISION)
        key = first + tl.arange(0, N)
        if bias is not None:
            scores = scores + tl.load(bias + key, mask=key < tokens, other=0.0)[None, :]
        exponents = scores * scale - log_M[:, None]
        if MASKED:
            sees = (key[None, :] <= high_M[:, None]) & (key[None, :] >= low_M[:, None])
            exponents = tl.where(sees, exponents, float("-inf"))
        shares = tl.exp2(exponents)
        grads = shares * (tl.dot(grad_MD, tl.trans(v_ND), input_precision=PRECISION) - dot_M[:, None])
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
    q_MD = _tile(q, start, tokens, q_token, D, M)
    grad_MD = _tile(grad, start, tokens, grad_token, D, M)
    begin, common, inner, end = _keys_seen(lowest, start, tokens, M, N)
    total = _grad_query_span(
        q_MD, grad_MD, log_M, dot_M, low_M, row, k, v, None, begin, common, inner, end, tokens, k_token, v_token,
        scale, D, M, N, PRECISION,
    )  # fmt: skip
    _put(grad_q + head * D, total * size, start, tokens, HEADS * D, D, M)
    if far_q is not None:
        far_q += head.to(tl.int64) * far_q_head
        far_k += (head // SHARED).to(tl.int64) * far_k_head
        first_M = tl.load(first + row, mask=inside, other=tokens)
        q_MD = _tile(far_q, start, tokens, far_q_token, D, M)
        begin, common, inner, end = _far_keys_seen(first, lowest, start, tokens, M, N)
        total = _grad_query_span(
            q_MD, grad_MD, log_M, dot_M, first_M, low_M - 1, far_k, v, bias, begin, common, inner, end, tokens,
            far_k_token, v_token, scale, D, M, N, PRECISION,
        )  # fmt: skip
        _put(grad_far_q + head * D, total * size, start, tokens, HEADS * D, D, M)


@triton.jit
def _grad_keys(
    k_total, v_total, bias_total, k_ND, v_ND, bias_N, key, q, grad, logs, dots, low, beyond, begin, end, tokens,
    q_stride, grad_stride, scale,
    D: tl.constexpr, M: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Queries see from `low` on, and nothing from `beyond` on; or up to themselves, where that is None."""
    for first in range(begin, end, M):
        q_MD = _tile(q, first, tokens, q_stride, D, M)
        grad_MD = _tile(grad, first, tokens, grad_stride, D, M)
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
        shares = tl.exp2(exponents)
        v_total = tl.dot(shares.to(grad_MD.dtype), grad_MD, v_total, input_precision=PRECISION)
        grads = shares * (tl.dot(v_ND, tl.trans(grad_MD), input_precision=PRECISION) - dot_M[None, :])
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
    """By the queries that see some of the keys, those that see all, and again some, of all heads that share them."""
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
    """Keys and values of a tile, grad_value at by all queries that see them; `final` is the last that sees one far away.

    The bias of a key is grad_value at by every head: each group of heads has a sum of its own.
    """
    start, group = tl.program_id(0) * N, tl.program_id(1)
    k += group.to(tl.int64) * k_head
    v += group.to(tl.int64) * v_head
    key = start + tl.arange(0, N)
    k_ND = _tile(k, start, tokens, k_token, D, N)
    v_ND = _tile(v, start, tokens, v_token, D, N)
    v_total = tl.zeros((N, D), tl.float32)
    # The last token that sees the last of these keys, and the last that sees all of them.
    last = tl.minimum(start + N, tokens) - 1
    end = tl.load(highest + last) + 1
    begin = start // M * M
    inner = tl.minimum(tl.cdiv(start + N, M) * M, end)
    common = tl.maximum((tl.load(highest + start) + 1) // M * M, inner)
    k_total, v_total, _ = _grad_key_span(
        v_total, k_ND, v_ND, None, key, q, grad, logs, dots, lowest, None, begin, inner, common, end, group, tokens,
        q_token, q_head, grad_token, grad_head, scale, SHARED, D, M, N, PRECISION,
    )  # fmt: skip
    _put(grad_k + group * D, k_total * size, start, tokens, HEADS // SHARED * D, D, N)
    if far_q is not None:
        k_ND = _tile(far_k + group.to(tl.int64) * far_k_head, start, tokens, far_k_token, D, N)
        bias_N = tl.load(bias + key, mask=key < tokens, other=0.0)
        # Who has left the first of these keys behind sees it far away, and after the last all of them.
        end = tl.load(final + last) + 1
        begin = (tl.load(highest + start) + 1) // M * M
        inner = tl.minimum(tl.cdiv(tl.load(highest + last) + 1, M) * M, end)
        common = tl.maximum((tl.load(final + start) + 1) // M * M, inner)
        k_total, v_total, bias_total = _grad_key_span(
            v_total, k_ND, v_ND, bias_N, key, far_q, grad, logs, dots, first, lowest, begin, inner, common, end, group,
            tokens, far_q_token, far_q_head, grad_token, grad_head, scale, SHARED, D, M, N, PRECISION,
        )  # fmt: skip
        _put(grad_far_k + group * D, k_total * size, start, tokens, HEADS // SHARED * D, D, N)
        tl.store(grad_bias + group.to(tl.int64) * tokens + key, bias_total * size, mask=key < tokens)
    _put(grad_v + group * D, v_total, start, tokens, HEADS // SHARED * D, D, N)

"""Triton kernels of window attention.

No input is rolled, partitioned or gathered beforehand: a program computes the addresses of the tokens of its window in
the image, reads their slices of qkv, and writes its result there.

- Keys are processed in reverse order, which does not change attention. The relative position of the query at (y, x) and
  the key at (v, u) from the end is then (y + v, x + u), so the biases of neighboring keys are adjacent in memory.
  `bias` is the expanded table, (heads, 2·window − 1, window, window) by head, y + v, x and u. It fits the L1 cache and
  is read in wide loads.
- Few head sizes are multiples of the load width. The slice of a head is therefore read from the last aligned channel
  before it, and channels of neighboring heads at its ends are set to zero where they would contribute. Blocks are
  powers of two, so a head of 80 channels would be padded to 128. If heads start at aligned channels and their size is
  the sum of two powers of two, forward reads them in two pieces (PADDED and REST).
- `lse` is the base-2 logarithm of the softmax denominator of each query, from which backward recomputes the
  probabilities. Base 2 matches the exponential instruction of the GPU.

N: tokens per window. `window_index` counts the windows of all images; `lse` and `delta` are (windows, heads, N).
"""

import triton
import triton.language as tl

from redline.ops.window_attention.reference import MASKED

_MASKED = tl.constexpr(MASKED)
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _tokens(position, window_index, height, width, WINDOW: tl.constexpr, SHIFT: tl.constexpr):
    """Returns the indices, in the batch of images, of the tokens at these positions of a window."""
    columns = width // WINDOW
    windows = height // WINDOW * columns
    image = (window_index // windows).to(tl.int64)
    y = window_index % windows // columns * WINDOW + position // WINDOW + SHIFT
    x = window_index % columns * WINDOW + position % WINDOW + SHIFT
    y = tl.where(y < height, y, y - height)
    x = tl.where(x < width, x, x - width)
    return (image * height + y) * width + x


@triton.jit
def _region(position, window_index, height, width, WINDOW: tl.constexpr, SHIFT: tl.constexpr):
    """Returns the region of each token of a window. Regions other than 0 were wrapped around by the shift."""
    columns = width // WINDOW
    rows = height // WINDOW
    last_row = window_index % (rows * columns) // columns == rows - 1
    last_column = window_index % columns == columns - 1
    below = (position // WINDOW >= WINDOW - SHIFT) & last_row
    right = (position % WINDOW >= WINDOW - SHIFT) & last_column
    return below.to(tl.int32) * 2 + right.to(tl.int32)


@triton.jit
def _read(base, tokens, head, STRIDE: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, ALIGN: tl.constexpr):
    """Loads the slice of one head, widened to multiples of ALIGN, so it may include channels of other heads."""
    start = head * SIZE // ALIGN * ALIGN
    end = tl.cdiv((head + 1) * SIZE, ALIGN) * ALIGN
    channel = tl.arange(0, PADDED)[None, :]
    return tl.load(base + start + tokens[:, None] * STRIDE + channel, mask=channel < end - start, other=0.0)


@triton.jit
def _read_piece(base, tokens, head, STRIDE: tl.constexpr, SIZE: tl.constexpr, PIECE: tl.constexpr):
    """Loads the first PIECE channels of one head, which must have at least as many."""
    return tl.load(base + tokens[:, None] * STRIDE + (head * SIZE + tl.arange(0, PIECE)[None, :]))


@triton.jit
def _own(head, SIZE: tl.constexpr, PADDED: tl.constexpr, ALIGN: tl.constexpr):
    """Returns the mask of the channels loaded by `_read` that belong to the head."""
    channel = tl.arange(0, PADDED)[None, :] - head * SIZE % ALIGN
    return (channel >= 0) & (channel < SIZE)


@triton.jit
def _read_own(base, tokens, head, STRIDE: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, ALIGN: tl.constexpr):
    """Loads the slice of one head with zeros around it, so that products with `_read` slices ignore other heads."""
    block = _read(base, tokens, head, STRIDE, SIZE, PADDED, ALIGN)
    return tl.where(_own(head, SIZE, PADDED, ALIGN), block, 0.0)


@triton.jit
def _write(
    base, tokens, head, block, STRIDE: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, ALIGN: tl.constexpr
):
    start = head * SIZE // ALIGN * ALIGN
    channel = tl.arange(0, PADDED)[None, :]
    offset = base + start + tokens[:, None] * STRIDE + channel
    tl.store(offset, block.to(base.dtype.element_ty), mask=_own(head, SIZE, PADDED, ALIGN))


@triton.jit
def _bias_column(rank, WINDOW: tl.constexpr, RUN: tl.constexpr):
    """Returns the part of the index into `bias` that depends on the key; the query's part is position · WINDOW.

    Tells the compiler that the indices of each RUN successive keys are contiguous.
    """
    return tl.max_contiguous(rank // WINDOW * WINDOW * WINDOW + rank % WINDOW, RUN)


@triton.jit
def _bias(bias, offset, same_region, SHIFT: tl.constexpr):
    """Returns the bias of each pair of query and key, plus the mask between regions."""
    added = tl.load(bias + offset).to(tl.float32)
    if SHIFT > 0:
        added += tl.where(same_region, 0.0, _MASKED)
    return added


@triton.jit
def forward_kernel(
    qkv, bias, out, lse, height, width, scale,
    HEADS: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, REST: tl.constexpr, ALIGN: tl.constexpr,
    WINDOW: tl.constexpr, SHIFT: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, RUN: tl.constexpr,
    PRECISION: tl.constexpr, WRITES_LSE: tl.constexpr,
):  # fmt: skip
    """Computes one block of queries of one head in one window, over all keys."""
    N: tl.constexpr = WINDOW * WINDOW
    WIDTH: tl.constexpr = HEADS * SIZE
    program = tl.program_id(0)
    first = program % (N // BLOCK_Q) * BLOCK_Q
    head = program // (N // BLOCK_Q) % HEADS
    window_index = program // (N // BLOCK_Q * HEADS)
    bias += head * (2 * WINDOW - 1) * N

    position = first + tl.arange(0, BLOCK_Q)
    tokens = _tokens(position, window_index, height, width, WINDOW, SHIFT)
    region = _region(position, window_index, height, width, WINDOW, SHIFT)
    maximum = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    total = tl.full((BLOCK_Q,), 0.0, tl.float32)
    mixed = tl.full((BLOCK_Q, PADDED), 0.0, tl.float32)
    if REST > 0:
        rest = head * SIZE + PADDED + tl.arange(0, REST)[None, :]
        query = _read_piece(qkv, tokens, head, 3 * WIDTH, SIZE, PADDED)
        query_rest = tl.load(qkv + tokens[:, None] * (3 * WIDTH) + rest)
        mixed_rest = tl.full((BLOCK_Q, REST), 0.0, tl.float32)
    else:
        query = _read_own(qkv, tokens, head, 3 * WIDTH, SIZE, PADDED, ALIGN)
    for start in range(0, N, BLOCK_K):
        rank = start + tl.arange(0, BLOCK_K)
        column = _bias_column(rank, WINDOW, RUN)
        key_tokens = _tokens(N - 1 - rank, window_index, height, width, WINDOW, SHIFT)
        key_region = _region(N - 1 - rank, window_index, height, width, WINDOW, SHIFT)
        added = _bias(bias, position[:, None] * WINDOW + column[None, :], region[:, None] == key_region[None, :], SHIFT)
        if REST > 0:
            key = _read_piece(qkv + WIDTH, key_tokens, head, 3 * WIDTH, SIZE, PADDED)
            value = _read_piece(qkv + 2 * WIDTH, key_tokens, head, 3 * WIDTH, SIZE, PADDED)
            key_rest = tl.load(qkv + WIDTH + key_tokens[:, None] * (3 * WIDTH) + rest)
            value_rest = tl.load(qkv + 2 * WIDTH + key_tokens[:, None] * (3 * WIDTH) + rest)
            score = tl.dot(query, tl.trans(key), input_precision=PRECISION)
            score = tl.dot(query_rest, tl.trans(key_rest), score, input_precision=PRECISION) * scale + added
        else:
            key = _read(qkv + WIDTH, key_tokens, head, 3 * WIDTH, SIZE, PADDED, ALIGN)
            value = _read(qkv + 2 * WIDTH, key_tokens, head, 3 * WIDTH, SIZE, PADDED, ALIGN)
            score = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale + added
        new_maximum = tl.maximum(maximum, tl.max(score, 1))
        weight = tl.exp2(score * _LOG2_E - (new_maximum * _LOG2_E)[:, None])
        decay = tl.exp2((maximum - new_maximum) * _LOG2_E)
        total = total * decay + tl.sum(weight, 1)
        mixed = tl.dot(weight.to(value.dtype), value, mixed * decay[:, None], input_precision=PRECISION)
        if REST > 0:
            mixed_rest = tl.dot(
                weight.to(value.dtype), value_rest, mixed_rest * decay[:, None], input_precision=PRECISION
            )
        maximum = new_maximum
    share = (1.0 / total)[:, None]
    if REST > 0:
        offset = out + tokens[:, None] * WIDTH
        channel = head * SIZE + tl.arange(0, PADDED)[None, :]
        tl.store(offset + channel, (mixed * share).to(out.dtype.element_ty))
        tl.store(offset + rest, (mixed_rest * share).to(out.dtype.element_ty))
    else:
        _write(out, tokens, head, mixed * share, WIDTH, SIZE, PADDED, ALIGN)
    if WRITES_LSE:
        offset = lse + (window_index * HEADS + head).to(tl.int64) * N + position
        tl.store(offset, maximum * _LOG2_E + tl.log2(total))


@triton.jit
def query_gradient_kernel(
    qkv, bias, out, lse, gradient, delta, qkv_gradient, height, width, scale,
    HEADS: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, ALIGN: tl.constexpr, WINDOW: tl.constexpr,
    SHIFT: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, RUN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes the gradient of one block of queries, and `delta`, the sum of out · gradient of each query."""
    N: tl.constexpr = WINDOW * WINDOW
    WIDTH: tl.constexpr = HEADS * SIZE
    program = tl.program_id(0)
    first = program % (N // BLOCK_Q) * BLOCK_Q
    head = program // (N // BLOCK_Q) % HEADS
    window_index = program // (N // BLOCK_Q * HEADS)
    bias += head * (2 * WINDOW - 1) * N
    row = (window_index * HEADS + head).to(tl.int64) * N

    position = first + tl.arange(0, BLOCK_Q)
    tokens = _tokens(position, window_index, height, width, WINDOW, SHIFT)
    region = _region(position, window_index, height, width, WINDOW, SHIFT)
    query = _read_own(qkv, tokens, head, 3 * WIDTH, SIZE, PADDED, ALIGN)
    mixed = _read(out, tokens, head, WIDTH, SIZE, PADDED, ALIGN)
    grad = _read_own(gradient, tokens, head, WIDTH, SIZE, PADDED, ALIGN)
    own_delta = tl.sum(mixed.to(tl.float32) * grad.to(tl.float32), 1)
    tl.store(delta + row + position, own_delta)
    own_lse = tl.load(lse + row + position)
    grad_query = tl.full((BLOCK_Q, PADDED), 0.0, tl.float32)
    for start in range(0, N, BLOCK_K):
        rank = start + tl.arange(0, BLOCK_K)
        column = _bias_column(rank, WINDOW, RUN)
        key_tokens = _tokens(N - 1 - rank, window_index, height, width, WINDOW, SHIFT)
        key_region = _region(N - 1 - rank, window_index, height, width, WINDOW, SHIFT)
        key = _read(qkv + WIDTH, key_tokens, head, 3 * WIDTH, SIZE, PADDED, ALIGN)
        value = _read(qkv + 2 * WIDTH, key_tokens, head, 3 * WIDTH, SIZE, PADDED, ALIGN)
        added = _bias(bias, position[:, None] * WINDOW + column[None, :], region[:, None] == key_region[None, :], SHIFT)
        score = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale + added
        weight = tl.exp2(score * _LOG2_E - own_lse[:, None])
        grad_weight = tl.dot(grad, tl.trans(value), input_precision=PRECISION)
        grad_score = weight * (grad_weight - own_delta[:, None])
        grad_query = tl.dot(grad_score.to(key.dtype), key, grad_query, input_precision=PRECISION)
    _write(qkv_gradient, tokens, head, grad_query * scale, 3 * WIDTH, SIZE, PADDED, ALIGN)


@triton.jit
def key_gradient_kernel(
    qkv, bias, lse, gradient, delta, qkv_gradient, height, width, scale,
    HEADS: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, ALIGN: tl.constexpr, WINDOW: tl.constexpr,
    SHIFT: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, RUN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes the gradients of one block of keys and values over all queries. Scores are (keys, queries) here."""
    N: tl.constexpr = WINDOW * WINDOW
    WIDTH: tl.constexpr = HEADS * SIZE
    program = tl.program_id(0)
    first = program % (N // BLOCK_K) * BLOCK_K
    head = program // (N // BLOCK_K) % HEADS
    window_index = program // (N // BLOCK_K * HEADS)
    bias += head * (2 * WINDOW - 1) * N
    row = (window_index * HEADS + head).to(tl.int64) * N

    rank = first + tl.arange(0, BLOCK_K)
    column = _bias_column(rank, WINDOW, RUN)
    key_tokens = _tokens(N - 1 - rank, window_index, height, width, WINDOW, SHIFT)
    key_region = _region(N - 1 - rank, window_index, height, width, WINDOW, SHIFT)
    key = _read_own(qkv + WIDTH, key_tokens, head, 3 * WIDTH, SIZE, PADDED, ALIGN)
    value = _read_own(qkv + 2 * WIDTH, key_tokens, head, 3 * WIDTH, SIZE, PADDED, ALIGN)
    grad_key = tl.full((BLOCK_K, PADDED), 0.0, tl.float32)
    grad_value = tl.full((BLOCK_K, PADDED), 0.0, tl.float32)
    for start in range(0, N, BLOCK_Q):
        position = start + tl.arange(0, BLOCK_Q)
        tokens = _tokens(position, window_index, height, width, WINDOW, SHIFT)
        region = _region(position, window_index, height, width, WINDOW, SHIFT)
        query = _read(qkv, tokens, head, 3 * WIDTH, SIZE, PADDED, ALIGN)
        grad = _read(gradient, tokens, head, WIDTH, SIZE, PADDED, ALIGN)
        added = _bias(bias, position[None, :] * WINDOW + column[:, None], region[None, :] == key_region[:, None], SHIFT)
        score = tl.dot(key, tl.trans(query), input_precision=PRECISION) * scale + added
        weight = tl.exp2(score * _LOG2_E - tl.load(lse + row + position)[None, :])
        grad_value = tl.dot(weight.to(grad.dtype), grad, grad_value, input_precision=PRECISION)
        grad_weight = tl.dot(value, tl.trans(grad), input_precision=PRECISION)
        grad_score = weight * (grad_weight - tl.load(delta + row + position)[None, :])
        grad_key = tl.dot(grad_score.to(query.dtype), query, grad_key, input_precision=PRECISION)
    _write(qkv_gradient + WIDTH, key_tokens, head, grad_key * scale, 3 * WIDTH, SIZE, PADDED, ALIGN)
    _write(qkv_gradient + 2 * WIDTH, key_tokens, head, grad_value, 3 * WIDTH, SIZE, PADDED, ALIGN)


@triton.jit
def bias_gradient_kernel(
    qkv, bias, lse, gradient, delta, partial, height, width, windows, shares, scale,
    HEADS: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, ALIGN: tl.constexpr, WINDOW: tl.constexpr,
    SHIFT: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, RUN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Writes a block of one head's bias gradient, summed over every `shares`-th window, to (shares, heads, N, N)."""
    N: tl.constexpr = WINDOW * WINDOW
    WIDTH: tl.constexpr = HEADS * SIZE
    program = tl.program_id(0)
    rank = program % (N // BLOCK_K) * BLOCK_K + tl.arange(0, BLOCK_K)
    column = _bias_column(rank, WINDOW, RUN)
    program = program // (N // BLOCK_K)
    position = program % (N // BLOCK_Q) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    program = program // (N // BLOCK_Q)
    head = program % HEADS
    share = program // HEADS
    bias += head * (2 * WINDOW - 1) * N

    grad_pair = tl.full((BLOCK_Q, BLOCK_K), 0.0, tl.float32)
    for window_index in range(share, windows, shares):
        tokens = _tokens(position, window_index, height, width, WINDOW, SHIFT)
        region = _region(position, window_index, height, width, WINDOW, SHIFT)
        key_tokens = _tokens(N - 1 - rank, window_index, height, width, WINDOW, SHIFT)
        key_region = _region(N - 1 - rank, window_index, height, width, WINDOW, SHIFT)
        query = _read_own(qkv, tokens, head, 3 * WIDTH, SIZE, PADDED, ALIGN)
        grad = _read_own(gradient, tokens, head, WIDTH, SIZE, PADDED, ALIGN)
        key = _read(qkv + WIDTH, key_tokens, head, 3 * WIDTH, SIZE, PADDED, ALIGN)
        value = _read(qkv + 2 * WIDTH, key_tokens, head, 3 * WIDTH, SIZE, PADDED, ALIGN)
        added = _bias(bias, position[:, None] * WINDOW + column[None, :], region[:, None] == key_region[None, :], SHIFT)
        score = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale + added
        row = (window_index * HEADS + head).to(tl.int64) * N
        weight = tl.exp2(score * _LOG2_E - tl.load(lse + row + position)[:, None])
        grad_weight = tl.dot(grad, tl.trans(value), input_precision=PRECISION)
        grad_pair += weight * (grad_weight - tl.load(delta + row + position)[:, None])
    offset = ((share * HEADS + head) * N + position[:, None]) * N + rank[None, :]
    tl.store(partial + offset, grad_pair)

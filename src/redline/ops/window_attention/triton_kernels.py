"""Window attention on the GPU: what one program of each kernel does.

Nothing is rolled, cut into windows or looked up beforehand: a program computes where the tokens of its window lie in
the picture, reads their slices of qkv there, and writes its result there. Three things need saying:

- Keys are taken in reverse order, which attention does not mind. The offset between the query at (y, x) and the key of
  rank (v, u) from the end is then (y + v, x + u), and the biases of neighbouring keys lie behind each other in rising
  order. `bias` holds the table's rows once for every x, (heads, 2·window − 1, window, window) by head, y + v, x and u:
  small enough for the first-level cache, and read in wide loads.
- Few head sizes are multiples of what a GPU reads at once. A head's slice is therefore read from the last aligned
  channel before it; where the neighbours' channels at its ends would count, they are set to zero. Blocks are powers of
  two, so that a head of 80 would be read as 128: where heads begin at aligned channels and are a power of two and a
  smaller one, forward takes them in these two pieces (PADDED and REST).
- `lse` is the logarithm of each query's sum of exponentials, to base 2, for which the GPU has an exponential; from it
  the backward pass makes the probabilities anew. A "grad" is the gradient of what it names.

`window_index` counts the windows of all pictures; `lse` and `delta` are (windows, heads, N).
"""

import triton
import triton.language as tl

from redline.ops.window_attention.reference import MASKED

_MASKED = tl.constexpr(MASKED)
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _tokens(position, window_index, height, width, WINDOW: tl.constexpr, SHIFT: tl.constexpr):
    """Where in memory the tokens lie that stand at these positions of a window."""
    columns = width // WINDOW
    windows = height // WINDOW * columns
    picture = (window_index // windows).to(tl.int64)
    y = window_index % windows // columns * WINDOW + position // WINDOW + SHIFT
    x = window_index % columns * WINDOW + position % WINDOW + SHIFT
    y = tl.where(y < height, y, y - height)
    x = tl.where(x < width, x, x - width)
    return (picture * height + y) * width + x


@triton.jit
def _region(position, window_index, height, width, WINDOW: tl.constexpr, SHIFT: tl.constexpr):
    """Which part of the picture each token of a window is from: others than 0 were brought in by the wrapping."""
    columns = width // WINDOW
    rows = height // WINDOW
    last_row = window_index % (rows * columns) // columns == rows - 1
    last_column = window_index % columns == columns - 1
    below = (position // WINDOW >= WINDOW - SHIFT) & last_row
    right = (position % WINDOW >= WINDOW - SHIFT) & last_column
    return below.to(tl.int32) * 2 + right.to(tl.int32)


@triton.jit
def _read(base, tokens, head, STRIDE: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, ALIGN: tl.constexpr):
    """One head's slice of each token, from and up to a multiple of ALIGN: its ends are other heads' channels."""
    start = head * SIZE // ALIGN * ALIGN
    end = tl.cdiv((head + 1) * SIZE, ALIGN) * ALIGN
    channel = tl.arange(0, PADDED)[None, :]
    return tl.load(base + start + tokens[:, None] * STRIDE + channel, mask=channel < end - start, other=0.0)


@triton.jit
def _read_piece(base, tokens, head, STRIDE: tl.constexpr, SIZE: tl.constexpr, PIECE: tl.constexpr):
    """The first channels of one head's slice of each token, where all of them are its own."""
    return tl.load(base + tokens[:, None] * STRIDE + (head * SIZE + tl.arange(0, PIECE)[None, :]))


@triton.jit
def _own(head, SIZE: tl.constexpr, PADDED: tl.constexpr, ALIGN: tl.constexpr):
    """Which of the channels that `_read` gives are the head's own."""
    channel = tl.arange(0, PADDED)[None, :] - head * SIZE % ALIGN
    return (channel >= 0) & (channel < SIZE)


@triton.jit
def _read_own(base, tokens, head, STRIDE: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, ALIGN: tl.constexpr):
    """One head's slice of each token between zeros: against it, the ends of a `_read` count nothing."""
    block = _read(base, tokens, head, STRIDE, SIZE, PADDED, ALIGN)
    return tl.where(_own(head, SIZE, PADDED, ALIGN), block, 0.0)


@triton.jit
def _write(
    base, tokens, head, block, STRIDE: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, ALIGN: tl.constexpr
):
    start = head * SIZE // ALIGN * ALIGN
    channel = tl.arange(0, PADDED)[None, :]
    place = base + start + tokens[:, None] * STRIDE + channel
    tl.store(place, block.to(base.dtype.element_ty), mask=_own(head, SIZE, PADDED, ALIGN))


@triton.jit
def _bias_column(rank, WINDOW: tl.constexpr, RUN: tl.constexpr):
    """A key's share of the place of its biases; a query's is position · WINDOW. RUN is how many are read at once."""
    return tl.max_contiguous(rank // WINDOW * WINDOW * WINDOW + rank % WINDOW, RUN)


@triton.jit
def _bias(bias, place, same_region, SHIFT: tl.constexpr):
    """What is added to the score of each pair."""
    added = tl.load(bias + place).to(tl.float32)
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
    """One block of queries of one head in one window, over all keys."""
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
    highest = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
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
        new_highest = tl.maximum(highest, tl.max(score, 1))
        weight = tl.exp2(score * _LOG2_E - (new_highest * _LOG2_E)[:, None])
        fade = tl.exp2((highest - new_highest) * _LOG2_E)
        total = total * fade + tl.sum(weight, 1)
        mixed = tl.dot(weight.to(value.dtype), value, mixed * fade[:, None], input_precision=PRECISION)
        if REST > 0:
            mixed_rest = tl.dot(
                weight.to(value.dtype), value_rest, mixed_rest * fade[:, None], input_precision=PRECISION
            )
        highest = new_highest
    share = (1.0 / total)[:, None]
    if REST > 0:
        place = out + tokens[:, None] * WIDTH
        channel = head * SIZE + tl.arange(0, PADDED)[None, :]
        tl.store(place + channel, (mixed * share).to(out.dtype.element_ty))
        tl.store(place + rest, (mixed_rest * share).to(out.dtype.element_ty))
    else:
        _write(out, tokens, head, mixed * share, WIDTH, SIZE, PADDED, ALIGN)
    if WRITES_LSE:
        place = lse + (window_index * HEADS + head).to(tl.int64) * N + position
        tl.store(place, highest * _LOG2_E + tl.log2(total))


@triton.jit
def query_gradient_kernel(
    qkv, bias, out, lse, gradient, delta, qkv_gradient, height, width, scale,
    HEADS: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, ALIGN: tl.constexpr, WINDOW: tl.constexpr,
    SHIFT: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, RUN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """As forward: the gradient of a block of queries; and `delta`, each query's sum of out · gradient."""
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
    """The gradients of a block of keys and their values, over all queries; keys go down here, and queries across."""
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
    """The gradient of a block of pairs of one head, summed over a share of the windows: (shares, heads, N, ranks)."""
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
    place = ((share * HEADS + head) * N + position[:, None]) * N + rank[None, :]
    tl.store(partial + place, grad_pair)

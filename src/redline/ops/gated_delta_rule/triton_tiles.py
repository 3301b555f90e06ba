"""Triton functions that the kernels of the gated delta rule share: loading tiles, and the decays of a chunk.

A tensor (B, S, H, X) is loaded in tiles of one chunk of one head: C tokens and some of the X channels. The tensor is
indexed in slices of X elements, one for each token and head: `row` is the index of the slice of the chunk's first
token, and `left` is the number of tokens from there to the end of the sequence.
"""

import triton
import triton.language as tl


@triton.jit
def load_rows(base, row, left, heads, x, X: tl.constexpr, C: tl.constexpr):
    """Loads a tile (C, x), with zeros past the last token."""
    i = tl.arange(0, C)
    inside = (i < left)[:, None] & (x < X)[None, :]
    return tl.load(base + row * X + i[:, None] * (heads * X) + x[None, :], mask=inside, other=0.0)


@triton.jit
def load_columns(base, row, left, heads, x, X: tl.constexpr, C: tl.constexpr):
    """Loads the transposed tile (x, C)."""
    i = tl.arange(0, C)
    inside = (x < X)[:, None] & (i < left)[None, :]
    return tl.load(base + row * X + i[None, :] * (heads * X) + x[:, None], mask=inside, other=0.0)


@triton.jit
def store_rows(base, row, left, heads, x, value, X: tl.constexpr, C: tl.constexpr):
    i = tl.arange(0, C)
    inside = (i < left)[:, None] & (x < X)[None, :]
    tl.store(base + row * X + i[:, None] * (heads * X) + x[None, :], value.to(base.dtype.element_ty), mask=inside)


@triton.jit
def load_state(base, index, k, v, KEYS: tl.constexpr, VALUES: tl.constexpr):
    """Loads a tile (k, v) of the state with this index."""
    inside = (k < KEYS)[:, None] & (v < VALUES)[None, :]
    return tl.load(base + index * (KEYS * VALUES) + k[:, None] * VALUES + v[None, :], mask=inside, other=0.0)


@triton.jit
def store_state(base, index, k, v, value, KEYS: tl.constexpr, VALUES: tl.constexpr):
    inside = (k < KEYS)[:, None] & (v < VALUES)[None, :]
    pointer = base + index * (KEYS * VALUES) + k[:, None] * VALUES + v[None, :]
    tl.store(pointer, value.to(base.dtype.element_ty), mask=inside)


@triton.jit
def chunk_offsets(chunk_index, sequence, tokens, heads, C: tl.constexpr):
    """Returns the chunk's first token, `row`, `left`, and the offsets of its head and its sequence.

    `sequence` is the index of the head among the heads of all sequences. The offset of the head is where the
    head begins in tensors with one value per token and head, (B, H, S). The offset of the sequence is where the
    sequence begins in the document indices, (B, S).
    """
    batch = (sequence // heads).to(tl.int64)
    begin = chunk_index * C
    row = (batch * tokens + begin) * heads + sequence % heads
    return begin, row, tokens - begin, sequence.to(tl.int64) * tokens, batch * tokens


@triton.jit
def decays(decay, documents, line, page, begin, tokens, C: tl.constexpr, PACKED: tl.constexpr):
    """Returns the decays from the chunk's start to each token, from each token to the end, and of the whole chunk."""
    i = tl.arange(0, C)
    inside = begin + i < tokens
    last = min(begin + C, tokens) - 1
    c = tl.load(decay + line + begin + i, mask=inside, other=0.0)
    c_last = tl.load(decay + line + last)
    from_start = inside
    to_end = inside
    whole = tl.exp(c_last)
    if PACKED:
        d = tl.load(documents + page + begin + i, mask=inside, other=0)
        d_last = tl.load(documents + page + last)
        d_before = tl.load(documents + page + max(begin - 1, 0))
        from_start = from_start & (d == d_before)
        to_end = to_end & (d == d_last)
        whole = tl.where(d_last == d_before, whole, 0.0)
    # Masks the exponent, not the result, because the exponential could overflow.
    from_start = tl.exp(tl.where(from_start, c, float("-inf")))
    to_end = tl.exp(tl.where(to_end, c_last - c, float("-inf")))
    return from_start, to_end, whole


@triton.jit
def pairs(decay, documents, line, page, begin, tokens, C: tl.constexpr, PACKED: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Returns the decays (C, C) from token j to token i ≥ j of the chunk, in row i and column j, or the transpose."""
    i = tl.arange(0, C)
    inside = begin + i < tokens
    c = tl.load(decay + line + begin + i, mask=inside, other=0.0)
    if TRANSPOSED:
        known = (i[:, None] <= i[None, :]) & inside[None, :]
        exponent = c[None, :] - c[:, None]
    else:
        known = (i[:, None] >= i[None, :]) & inside[:, None]
        exponent = c[:, None] - c[None, :]
    if PACKED:
        d = tl.load(documents + page + begin + i, mask=inside, other=0)
        known = known & (d[:, None] == d[None, :])
    return tl.exp(tl.where(known, exponent, float("-inf")))

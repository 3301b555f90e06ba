"""What the programs of all kernels of the gated delta rule do alike: read tiles, and the decays of a chunk.

A tensor (B, S, H, X) is read in tiles of one chunk of one head: its C tokens, and some of its X numbers. `row` is where
its first token lies, counted in slices of X numbers, and `left` how many tokens there are from there on.
"""

import triton
import triton.language as tl


@triton.jit
def load_rows(base, row, left, heads, x, X: tl.constexpr, C: tl.constexpr):
    """(C, x): tokens past the end are zero."""
    i = tl.arange(0, C)
    inside = (i < left)[:, None] & (x < X)[None, :]
    return tl.load(base + row * X + i[:, None] * (heads * X) + x[None, :], mask=inside, other=0.0)


@triton.jit
def load_columns(base, row, left, heads, x, X: tl.constexpr, C: tl.constexpr):
    """(x, C): the transpose, made by reading."""
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
    """(k, v) of one state of many."""
    inside = (k < KEYS)[:, None] & (v < VALUES)[None, :]
    return tl.load(base + index * (KEYS * VALUES) + k[:, None] * VALUES + v[None, :], mask=inside, other=0.0)


@triton.jit
def store_state(base, index, k, v, value, KEYS: tl.constexpr, VALUES: tl.constexpr):
    inside = (k < KEYS)[:, None] & (v < VALUES)[None, :]
    pointer = base + index * (KEYS * VALUES) + k[:, None] * VALUES + v[None, :]
    tl.store(pointer, value.to(base.dtype.element_ty), mask=inside)


@triton.jit
def place(chunk_index, sequence, tokens, heads, C: tl.constexpr):
    """Of a chunk: its first token; that one's slice; the tokens from there on; and where its rows of numbers begin.

    `sequence` counts heads of sequences; a number a token and head is stored as (B, H, S), a document's as (B, S).
    """
    batch = (sequence // heads).to(tl.int64)
    begin = chunk_index * C
    row = (batch * tokens + begin) * heads + sequence % heads
    return begin, row, tokens - begin, sequence.to(tl.int64) * tokens, batch * tokens


@triton.jit
def decays(decay, documents, line, page, begin, tokens, C: tl.constexpr, PACKED: tl.constexpr):
    """What a token still knows of the state before its chunk, the state after it of a token, and that of the former."""
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
    # Outside, the exponent is minus infinity and not the result zero: the exponential there may have no end.
    from_start = tl.exp(tl.where(from_start, c, float("-inf")))
    to_end = tl.exp(tl.where(to_end, c_last - c, float("-inf")))
    return from_start, to_end, whole


@triton.jit
def pairs(decay, documents, line, page, begin, tokens, C: tl.constexpr, PACKED: tl.constexpr, TRANSPOSED: tl.constexpr):
    """(C, C): what token i (in rows, or in columns if transposed) still knows of token j ≤ i of its chunk."""
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

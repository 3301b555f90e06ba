"""Attention of one new token a row by Triton kernels, which also write its key and value into the ring.

A program takes one key head of one row, with all heads that share it, and a share of the places; where one share is not
all, a second kernel puts the shares together in order. Only places that are held are read, so that a step costs what
the text is long, not what the buffer is. The new token is read from where it comes from, and its old place in the ring
is passed over: no program depends on what another writes.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from redline.ops import kernel

INTERPRETED = kernel.INTERPRETED


@dataclass(frozen=True)
class Tiles:
    """Places that a program looks at together, its warps, and the least places that are worth a share of their own."""

    places: int
    warps: int
    stages: int
    share: int


TILES = Tiles(64, 4, 3, 128)
_MERGE_WARPS = 2
_MOST_SHARES = 64


def decode_attention(
    q_BHD: Tensor, k_BGD: Tensor, v_BGD: Tensor, keys_BCGD: Tensor, values_BCGD: Tensor, lengths_B: Tensor, ring: int
) -> Tensor:
    """The same as the reference, without gradients."""
    return _attend(q_BHD, k_BGD, v_BGD, keys_BCGD, values_BCGD, lengths_B, ring)


def why_not(q_BHD: Tensor) -> str:
    """Why the kernels cannot take this, or nothing."""
    if torch.is_grad_enabled() and q_BHD.requires_grad:
        return "it has no backward pass, and a gradient is wanted"
    return kernel.why_not(q_BHD)


@triton.jit
def attend_kernel(
    q, k, v, keys, values, lengths, out, partial, peaks, sums,
    scale, ring, heads, groups,
    q_row, q_head, k_row, k_head, v_row, v_head, cache_row, cache_place, cache_head,
    SHARES: tl.constexpr, SHARING: tl.constexpr, DIM: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row, group = (tl.program_id(0) // groups).to(tl.int64), tl.program_id(0) % groups
    part = tl.program_id(1)
    length = tl.load(lengths + row)
    new_place = length % ring
    held = tl.minimum(length, ring)
    r, c, d = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_D)
    in_r, in_d = r < SHARING, d < DIM
    head = group * SHARING + r
    q_mask = in_r[:, None] & in_d[None, :]
    queries = tl.load(q + row * q_row + head[:, None] * q_head + d[None, :], mask=q_mask, other=0.0)
    new_key = tl.load(k + row * k_row + group * k_head + d, mask=in_d, other=0.0)
    new_value = tl.load(v + row * v_row + group * v_head + d, mask=in_d, other=0.0)
    peak = tl.full((BLOCK_R,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_R,), tl.float32)
    mixed = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    base = row * cache_row + group * cache_head
    if part == 0:
        # The first share begins with the new token, so that it is never empty, and keeps it for later steps.
        tl.store(keys + base + new_place * cache_place + d, new_key, mask=in_d)
        tl.store(values + base + new_place * cache_place + d, new_value, mask=in_d)
        peak = tl.sum(queries.to(tl.float32) * new_key.to(tl.float32)[None, :], 1) * scale
        total += 1.0
        mixed += new_value.to(tl.float32)[None, :]
    share = tl.cdiv(tl.cdiv(held, SHARES), BLOCK_C) * BLOCK_C
    begin = part * share
    end = tl.minimum(begin + share, held)
    for start in range(begin, end, BLOCK_C):
        place = start + c
        seen = (place < end) & (place != new_place)
        at = base + place[:, None] * cache_place + d[None, :]
        mask = seen[:, None] & in_d[None, :]
        old_keys = tl.load(keys + at, mask=mask, other=0.0)
        scores = tl.dot(queries, tl.trans(old_keys), input_precision=PRECISION) * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        # A share that has seen nothing yet has no peak to come from.
        safe = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        shrink = tl.exp(peak - safe)
        weights = tl.exp(scores - safe[:, None])
        old_values = tl.load(values + at, mask=mask, other=0.0)
        total = total * shrink + tl.sum(weights, 1)
        product = tl.dot(weights.to(old_values.dtype), old_values, input_precision=PRECISION)
        mixed = mixed * shrink[:, None] + product
        peak = new_peak
    if SHARES == 1:
        result = mixed / total[:, None]
        to = (row * heads + head)[:, None] * DIM + d[None, :]
        tl.store(out + to, result.to(out.dtype.element_ty), mask=q_mask)
    else:
        slot = (row * heads + head) * SHARES + part
        tl.store(partial + slot[:, None] * DIM + d[None, :], mixed, mask=q_mask)
        tl.store(peaks + slot, peak, mask=in_r)
        tl.store(sums + slot, total, mask=in_r)


@triton.jit
def merge_kernel(
    partial, peaks, sums, out, SHARES: tl.constexpr, BLOCK_S: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    s, d = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    in_s, in_d = s < SHARES, d < DIM
    peak = tl.load(peaks + head * SHARES + s, mask=in_s, other=float("-inf"))
    total = tl.load(sums + head * SHARES + s, mask=in_s, other=0.0)
    at = (head * SHARES + s)[:, None] * DIM + d[None, :]
    mixed = tl.load(partial + at, mask=in_s[:, None] & in_d[None, :], other=0.0)
    weight = tl.exp(peak - tl.max(peak, 0))
    result = tl.sum(mixed * weight[:, None], 0) / tl.sum(total * weight, 0)
    tl.store(out + head * DIM + d, result.to(out.dtype.element_ty), mask=in_d)


@torch.library.custom_op("redline::decode_attention", mutates_args=("keys", "values"))
def _attend(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, ring: int) -> Tensor:
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    (rows, heads, dim), groups = q.shape, k.shape[1]
    shares = shares_for(rows * groups, ring, kernel.processors(q))
    out = torch.empty((rows, heads, dim), dtype=q.dtype, device=q.device)
    partial = peaks = sums = out
    if shares > 1:
        partial = torch.empty((rows, heads, shares, dim), dtype=torch.float32, device=q.device)
        peaks, sums = (torch.empty((rows, heads, shares), dtype=torch.float32, device=q.device) for _ in range(2))
    sharing = heads // groups
    strides = (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *keys.stride()[:3])
    constants = {
        "SHARES": shares,
        "SHARING": sharing,
        "DIM": dim,
        "BLOCK_R": kernel.padded(sharing),
        "BLOCK_C": TILES.places,
        "BLOCK_D": kernel.padded(dim),
        "PRECISION": "ieee",
        "num_warps": TILES.warps,
        "num_stages": TILES.stages,
    }
    tensors = (q, k, v, keys, values, lengths, out, partial, peaks, sums)
    kernel.launch(
        attend_kernel, (rows * groups, shares), *tensors, dim**-0.5, ring, heads, groups, *strides, **constants
    )
    if shares > 1:
        sizes = {"SHARES": shares, "BLOCK_S": kernel.padded(shares), "DIM": dim, "BLOCK_D": kernel.padded(dim)}
        kernel.launch(merge_kernel, (rows * heads,), partial, peaks, sums, out, **sizes, num_warps=_MERGE_WARPS)
    return out


@_attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, ring: int) -> Tensor:
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


def shares_for(programs: int, ring: int, processors: int) -> int:
    """So many that every multiprocessor has work, and none of them too little; by sizes alone, never by lengths."""
    return max(1, min(processors // programs, ring // TILES.share, _MOST_SHARES))

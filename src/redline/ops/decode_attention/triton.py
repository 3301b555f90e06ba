"""Decode attention with Triton kernels, which also write the new key and value into the ring.

A program computes the query heads that share one key head of one sequence, over one split of the positions. If there is
more than one split, a second kernel merges the splits in order. Only occupied positions are read, so the time of a
step depends on the length of the sequence, not of the buffer. The new key and value are read from the arguments, and
their position in the ring is skipped, so no program reads data that another program writes.

B: sequences, C: positions in the buffer, H: query heads, G: key and value heads, D: head dimension.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from redline.ops import kernel


@dataclass(frozen=True)
class Tiles:
    """Positions per block, warps and stages of a program, and the smallest number of positions in a split."""

    block: int
    warps: int
    stages: int
    split_size: int


TILES = Tiles(64, 4, 3, 128)
_MERGE_WARPS = 2
_MOST_SPLITS = 64


def why_not(q_BHD: Tensor) -> str:
    if torch.is_grad_enabled() and q_BHD.requires_grad:
        return "the kernels have no backward pass, and an input requires grad"
    return kernel.why_not(q_BHD)


@triton.jit
def attend_kernel(
    q, k, v, keys, values, lengths, out, partial, peaks, sums,
    scale, ring, heads, groups,
    q_row, q_head, k_row, k_head, v_row, v_head, cache_row, cache_place, cache_head,
    SPLITS: tl.constexpr, GROUP_SIZE: tl.constexpr, DIM: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row, group = (tl.program_id(0) // groups).to(tl.int64), tl.program_id(0) % groups
    part = tl.program_id(1)
    length = tl.load(lengths + row)
    new_position = length % ring
    held = tl.minimum(length, ring)
    r, c, d = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_D)
    in_r, in_d = r < GROUP_SIZE, d < DIM
    head = group * GROUP_SIZE + r
    q_mask = in_r[:, None] & in_d[None, :]
    queries = tl.load(q + row * q_row + head[:, None] * q_head + d[None, :], mask=q_mask, other=0.0)
    new_key = tl.load(k + row * k_row + group * k_head + d, mask=in_d, other=0.0)
    new_value = tl.load(v + row * v_row + group * v_head + d, mask=in_d, other=0.0)
    peak = tl.full((BLOCK_R,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_R,), tl.float32)
    mixed = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    base = row * cache_row + group * cache_head
    if part == 0:
        # The first split starts with the new token, so it is never empty, and stores it in the ring.
        tl.store(keys + base + new_position * cache_place + d, new_key, mask=in_d)
        tl.store(values + base + new_position * cache_place + d, new_value, mask=in_d)
        peak = tl.sum(queries.to(tl.float32) * new_key.to(tl.float32)[None, :], 1) * scale
        total += 1.0
        mixed += new_value.to(tl.float32)[None, :]
    split_size = tl.cdiv(tl.cdiv(held, SPLITS), BLOCK_C) * BLOCK_C
    begin = part * split_size
    end = tl.minimum(begin + split_size, held)
    for start in range(begin, end, BLOCK_C):
        position = start + c
        seen = (position < end) & (position != new_position)
        at = base + position[:, None] * cache_place + d[None, :]
        mask = seen[:, None] & in_d[None, :]
        old_keys = tl.load(keys + at, mask=mask, other=0.0)
        scores = tl.dot(queries, tl.trans(old_keys), input_precision=PRECISION) * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        # A split that has read no position yet has a peak of -inf, and -inf - -inf would be NaN.
        safe = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        shrink = tl.exp(peak - safe)
        weights = tl.exp(scores - safe[:, None])
        old_values = tl.load(values + at, mask=mask, other=0.0)
        total = total * shrink + tl.sum(weights, 1)
        product = tl.dot(weights.to(old_values.dtype), old_values, input_precision=PRECISION)
        mixed = mixed * shrink[:, None] + product
        peak = new_peak
    if SPLITS == 1:
        result = mixed / total[:, None]
        to = (row * heads + head)[:, None] * DIM + d[None, :]
        tl.store(out + to, result.to(out.dtype.element_ty), mask=q_mask)
    else:
        slot = (row * heads + head) * SPLITS + part
        tl.store(partial + slot[:, None] * DIM + d[None, :], mixed, mask=q_mask)
        tl.store(peaks + slot, peak, mask=in_r)
        tl.store(sums + slot, total, mask=in_r)


@triton.jit
def merge_kernel(
    partial, peaks, sums, out, SPLITS: tl.constexpr, BLOCK_S: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    s, d = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    in_s, in_d = s < SPLITS, d < DIM
    peak = tl.load(peaks + head * SPLITS + s, mask=in_s, other=float("-inf"))
    total = tl.load(sums + head * SPLITS + s, mask=in_s, other=0.0)
    at = (head * SPLITS + s)[:, None] * DIM + d[None, :]
    mixed = tl.load(partial + at, mask=in_s[:, None] & in_d[None, :], other=0.0)
    weight = tl.exp(peak - tl.max(peak, 0))
    result = tl.sum(mixed * weight[:, None], 0) / tl.sum(total * weight, 0)
    tl.store(out + head * DIM + d, result.to(out.dtype.element_ty), mask=in_d)


@kernel.custom_op("decode_attention", lambda q, *_: kernel.empty_like(q), mutates=("keys", "values"))
def decode_attention(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, ring: int
) -> Tensor:
    """Computes the same as the reference. The op has no gradient."""
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    (rows, heads, dim), groups = q.shape, k.shape[1]
    splits = splits_for(rows * groups, ring, kernel.processors(q))
    out = torch.empty((rows, heads, dim), dtype=q.dtype, device=q.device)
    partial = peaks = sums = out
    if splits > 1:
        partial = torch.empty((rows, heads, splits, dim), dtype=torch.float32, device=q.device)
        peaks, sums = (torch.empty((rows, heads, splits), dtype=torch.float32, device=q.device) for _ in range(2))
    group_size = heads // groups
    strides = (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *keys.stride()[:3])
    constants = {
        "SPLITS": splits,
        "GROUP_SIZE": group_size,
        "DIM": dim,
        "BLOCK_R": kernel.padded(group_size),
        "BLOCK_C": TILES.block,
        "BLOCK_D": kernel.padded(dim),
        "PRECISION": "ieee",
        "num_warps": TILES.warps,
        "num_stages": TILES.stages,
    }
    tensors = (q, k, v, keys, values, lengths, out, partial, peaks, sums)
    kernel.launch(
        attend_kernel, (rows * groups, splits), *tensors, dim**-0.5, ring, heads, groups, *strides, **constants
    )
    if splits > 1:
        sizes = {"SPLITS": splits, "BLOCK_S": kernel.padded(splits), "DIM": dim, "BLOCK_D": kernel.padded(dim)}
        kernel.launch(merge_kernel, (rows * heads,), partial, peaks, sums, out, **sizes, num_warps=_MERGE_WARPS)
    return out


def splits_for(programs: int, ring: int, processors: int) -> int:
    """Returns how many splits occupy every multiprocessor, up to a limit. Depends only on shapes, never on lengths."""
    return max(1, min(processors // programs, ring // TILES.split_size, _MOST_SPLITS))

"""Computes paged attention with Triton kernels.

The first kernel writes the new keys and values into the pages, and the next kernels read the pages. The positions of a
row with one new token are cut into splits of fixed length: a program computes the query heads that share one key head
over one split, and another kernel merges the splits in order. For a row with more new tokens, a program computes a tile
of them over all their positions. Neither the splits nor the tiles of a row depend on the other rows. The number of
programs depends only on shapes, so that a launch can be captured in a CUDA graph.

The shapes are those of `reference.py`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from redline.ops import kernel
from redline.ops.paged_attention.reference import ALL, PagedRows


@dataclass(frozen=True)
class Tiles:
    """Launch settings: `queries` is tokens times query heads of a program, `block` the positions it reads at a time."""

    queries: int
    block: int
    warps: int
    stages: int


SINGLE = Tiles(1, 64, 4, 3)
PROMPT = Tiles(64, 64, 4, 2)
_MERGE_WARPS = 2
_WIDEST_ROW_BYTES = 256


def why_not(q_THD: Tensor) -> str:
    if torch.is_grad_enabled() and q_THD.requires_grad:
        return "the kernels have no backward pass, and an input requires grad"
    return kernel.why_not(q_THD)


@triton.jit
def write_kernel(
    k, v, keys, values, slots, k_row, k_head, v_row, v_head,
    GROUPS: tl.constexpr, DIM: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot >= 0:
        g, d = tl.arange(0, BLOCK_G)[:, None], tl.arange(0, BLOCK_D)[None, :]
        mask = (g < GROUPS) & (d < DIM)
        to = (slot * GROUPS + g) * DIM + d
        tl.store(keys + to, tl.load(k + token * k_row + g * k_head + d, mask=mask), mask=mask)
        tl.store(values + to, tl.load(v + token * v_row + g * v_head + d, mask=mask), mask=mask)


@triton.jit
def attend_kernel(
    q, keys, values, starts, lengths, tables, out, partial, peaks, sums,
    scale, first_row, rows, heads, groups, q_row, q_head, table_row, split, window,
    SPLITS: tl.constexpr, QUERIES: tl.constexpr, GROUP_SIZE: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr,
    WINDOWED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    tile, group, part = tl.program_id(0) // groups, tl.program_id(0) % groups, tl.program_id(1)
    if QUERIES == 1:
        row = tile
        first = 0
    else:
        # The tiles of row r start at tile (first token // QUERIES) + r. Searches the last row that starts at or before
        # `tile`.
        base = tl.load(starts + first_row)
        low = tl.full((), 0, tl.int32)
        high = low + rows
        while low < high:
            middle = (low + high) // 2
            if (tl.load(starts + first_row + middle) - base) // QUERIES + middle <= tile:
                low = middle + 1
            else:
                high = middle
        row = low - 1
        first = (tile - ((tl.load(starts + first_row + row) - base) // QUERIES + row)) * QUERIES
    row = (row + first_row).to(tl.int64)
    begin_token = tl.load(starts + row).to(tl.int64)
    count = (tl.load(starts + row + 1) - begin_token).to(tl.int32)
    length = tl.load(lengths + row).to(tl.int32)
    m, c, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_D)
    query, head = first + m // GROUP_SIZE, group * GROUP_SIZE + m % GROUP_SIZE
    in_m, in_d = (m < QUERIES * GROUP_SIZE) & (query < count), d < DIM
    token, position = begin_token + query, length + query
    whole = length + tl.minimum(first + QUERIES, count)
    begin, end = part * split, tl.minimum((part + 1) * split, whole)
    if SPLITS == 1:
        begin, end = 0, whole
    if WINDOWED:
        begin = tl.maximum(begin, tl.maximum(length + first - window + 1, 0) // BLOCK_C * BLOCK_C)
    # Rows with one new token are always computed by the launch with QUERIES == 1, whatever else is in the step.
    if (first < count) & ((count == 1) == (QUERIES == 1)):
        q_mask = in_m[:, None] & in_d[None, :]
        queries = tl.load(q + token[:, None] * q_row + head[:, None] * q_head + d[None, :], mask=q_mask, other=0.0)
        peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        mixed = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        for start in range(begin, end, BLOCK_C):
            place = start + c
            page = tl.load(tables + row * table_row + place // PAGE, mask=place < end, other=0).to(tl.int64)
            at = ((page * PAGE + place % PAGE) * groups + group)[:, None] * DIM + d[None, :]
            mask = (place < end)[:, None] & in_d[None, :]
            old_keys = tl.load(keys + at, mask=mask, other=0.0)
            scores = tl.dot(queries, tl.trans(old_keys), input_precision=PRECISION) * scale
            seen = (place[None, :] <= position[:, None]) & (place < end)[None, :]
            if WINDOWED:
                seen = seen & (place[None, :] > position[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
            new_peak = tl.maximum(peak, tl.max(scores, 1))
            # A query that has seen no position yet has a peak of -inf, and -inf - -inf would be NaN.
            safe = tl.where(new_peak == float("-inf"), 0.0, new_peak)
            shrink = tl.exp(peak - safe)
            weights = tl.exp(scores - safe[:, None])
            old_values = tl.load(values + at, mask=mask, other=0.0)
            total = total * shrink + tl.sum(weights, 1)
            product = tl.dot(weights.to(old_values.dtype), old_values, input_precision=PRECISION)
            mixed = mixed * shrink[:, None] + product
            peak = new_peak
        to = token * heads + head
        if SPLITS == 1:
            # Padded queries attend to no position, so their total is 0 and must not be a divisor.
            result = mixed / tl.where(total > 0, total, 1.0)[:, None]
            tl.store(out + to[:, None] * DIM + d[None, :], result.to(out.dtype.element_ty), mask=q_mask)
        else:
            slot = to * SPLITS + part
            tl.store(peaks + slot, peak, mask=in_m)
            # For a split without positions, the merge kernel reads only the peak.
            if begin < end:
                tl.store(partial + slot[:, None] * DIM + d[None, :], mixed, mask=q_mask)
                tl.store(sums + slot, total, mask=in_m)


@triton.jit
def merge_kernel(
    partial, peaks, sums, out, SPLITS: tl.constexpr, BLOCK_S: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    s, d = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    in_d = d < DIM
    peak = tl.load(peaks + head * SPLITS + s, mask=s < SPLITS, other=float("-inf"))
    held = peak > float("-inf")
    total = tl.load(sums + head * SPLITS + s, mask=held, other=0.0)
    at = (head * SPLITS + s)[:, None] * DIM + d[None, :]
    mixed = tl.load(partial + at, mask=held[:, None] & in_d[None, :], other=0.0)
    weight = tl.exp(peak - tl.max(peak, 0))
    result = tl.sum(mixed * weight[:, None], 0) / tl.sum(total * weight, 0)
    tl.store(out + head * DIM + d, result.to(out.dtype.element_ty), mask=in_d)


@kernel.custom_op("paged_attention", lambda q, *_: kernel.empty_like(q), mutates=("keys", "values"))
def _paged_attention(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor, starts: Tensor, lengths: Tensor,
    tables: Tensor, singles: int, prompts: int, split: int, window: int,
) -> Tensor:  # fmt: skip
    q, k, v = (kernel.rows_contiguous(one) for one in (q, k, v))
    tokens, heads, dim = q.shape
    rows, groups, size = len(lengths), k.shape[1], keys.shape[1]
    singles, prompts = (rows if number == ALL else number for number in (singles, prompts))
    sizes = {"GROUPS": groups, "DIM": dim, "BLOCK_G": kernel.padded(groups, 1), "BLOCK_D": kernel.padded(dim)}
    strides = (*k.stride()[:2], *v.stride()[:2])
    kernel.launch(write_kernel, (tokens,), k, v, keys, values, slots, *strides, **sizes, num_warps=SINGLE.warps)
    out = torch.empty((tokens, heads, dim), dtype=q.dtype, device=q.device)
    tensors = (q, keys, values, starts, lengths, tables, out)
    if singles:
        # Rounds up to whole blocks, so that every split begins at a block.
        split = -(-split // SINGLE.block) * SINGLE.block
        splits = max(1, -(-tables.shape[1] * size // split))
        partial = peaks = sums = out
        if splits > 1:
            partial = torch.empty((singles, heads, splits, dim), dtype=torch.float32, device=q.device)
            peaks, sums = (
                torch.empty((singles, heads, splits), dtype=torch.float32, device=q.device) for _ in range(2)
            )
        _attend(SINGLE, (1, splits), (0, singles, singles), tensors, (partial, peaks, sums), split, window)
        if splits > 1:
            # This also writes to tokens of rows with more tokens; the last kernel overwrites them.
            merged = {"SPLITS": splits, "BLOCK_S": kernel.padded(splits), "DIM": dim, "BLOCK_D": kernel.padded(dim)}
            kernel.launch(merge_kernel, (singles * heads,), partial, peaks, sums, out, **merged, num_warps=_MERGE_WARPS)
    if rows > prompts:
        # At least 2, because the kernel takes QUERIES == 1 as the launch for rows with one token.
        queries = max(2, PROMPT.queries // (heads // groups))
        tiles = (tokens - prompts) // queries + rows - prompts
        _attend(PROMPT, (queries, 1), (prompts, rows - prompts, tiles), tensors, (out, out, out), 1, window)
    return out


def _attend(
    tile: Tiles,
    shape: tuple[int, int],
    part: tuple[int, int, int],
    tensors: tuple[Tensor, ...],
    scratch: tuple[Tensor, Tensor, Tensor],
    split: int,
    window: int,
) -> None:
    """Launches the kernel. `shape` is (queries, splits); `part` is (first row, number of rows, number of tiles)."""
    (queries, splits), (first_row, rows, tiles) = shape, part
    q, keys, tables = tensors[0], tensors[1], tensors[5]
    (_, heads, dim), (_, size, groups, _) = q.shape, keys.shape
    group_size = heads // groups
    constants = {
        "SPLITS": splits,
        "QUERIES": queries,
        "GROUP_SIZE": group_size,
        "PAGE": size,
        "DIM": dim,
        "WINDOWED": window > 0,
        "BLOCK_M": kernel.padded(queries * group_size),
        # Halves the block for wide heads, so that all stages fit into the shared memory of every GPU.
        "BLOCK_C": tile.block if q.element_size() * dim <= _WIDEST_ROW_BYTES else tile.block // 2,
        "BLOCK_D": kernel.padded(dim),
        "PRECISION": "ieee",
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
    numbers = (dim**-0.5, first_row, rows, heads, groups, *q.stride()[:2], tables.stride(0), split, window)
    kernel.launch(attend_kernel, (tiles * groups, splits), *tensors, *scratch, *numbers, **constants)


def paged_attention(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    keys_NPGD: Tensor,
    values_NPGD: Tensor,
    rows: PagedRows,
    window: int | None = None,
) -> Tensor:
    """Computes the same as the reference. The op has no gradient."""
    new, numbers = (q_THD, k_TGD, v_TGD), (rows.slots_T, rows.starts_E, rows.lengths_R, rows.tables_RW)
    return _paged_attention(*new, keys_NPGD, values_NPGD, *numbers, rows.singles, rows.prompts, rows.split, window or 0)

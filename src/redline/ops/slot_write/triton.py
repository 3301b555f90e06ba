"""Writes tokens into a bank of slots with two Triton kernels, whatever the number of tokens.

The first kernel computes the cosine of every slot with every token, one program per slot. In the second kernel, one
program per sequence processes the tokens in order and keeps the scores and masses of all slots in registers. A token
that changes a slot updates one key, one value, and the cosines of that key. The decisions are those of the reference,
unless cosines differ from each other or from the threshold by less than their fp32 rounding error.

B: sequences, M: slots, C: tokens, H: heads, D: channels, N: channels of all heads.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from redline.ops import kernel
from redline.ops.slot_write.reference import Slots, Written

# A program loads at most this many elements of keys per step, and at most this many of a single key.
_TILE, _LARGEST_BLOCK = 4096, 256
_WARPS = 4


def slot_write(
    slots: Slots, key_BCHD: Tensor, value_BCHD: Tensor, score_BC: Tensor, wanted_BC: Tensor, threshold: float
) -> tuple[Slots, Written]:
    """Computes the same as the reference. The op has no gradient."""
    after = Slots(*(tensor.clone(memory_format=torch.contiguous_format) for tensor in slots))
    offered = (key_BCHD.contiguous(), value_BCHD.contiguous(), score_BC.contiguous(), wanted_BC.to(torch.int8))
    return after, Written(*_write(*after, *offered, threshold).unbind(1))


def why_not(key_BCHD: Tensor, value_BCHD: Tensor, score_BC: Tensor, slots: Slots) -> str:
    if torch.is_grad_enabled() and any(t.requires_grad for t in (*slots, key_BCHD, value_BCHD, score_BC)):
        return "the kernels have no backward pass, and an input requires grad"
    if {tensor.dtype for tensor in (*slots[2:], score_BC)} != {torch.float32}:
        return "scores, masses, usage and age must be float32"
    return kernel.why_not(key_BCHD)


@triton.jit
def _cosines(key, tokens, count, SIZE: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr):
    """Returns the cosines of one key with the tokens of its sequence."""
    c, n = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_N)
    products, squares = tl.zeros((BLOCK_C,), tl.float32), tl.zeros((BLOCK_C,), tl.float32)
    own = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, SIZE, BLOCK_N):
        at = start + n
        one = tl.load(key + at, mask=at < SIZE, other=0.0).to(tl.float32)
        mask = (c < count)[:, None] & (at < SIZE)[None, :]
        others = tl.load(tokens + c[:, None] * SIZE + at[None, :], mask=mask, other=0.0).to(tl.float32)
        products += tl.sum(others * one[None, :], 1)
        squares += tl.sum(others * others, 1)
        own += one * one
    lengths = tl.maximum(tl.sqrt(squares), 1e-8) * tl.maximum(tl.sqrt(tl.sum(own, 0)), 1e-8)
    return products / lengths


@triton.jit
def _lerp(old, new, share):
    """Interpolates with the rounding of torch.lerp."""
    step = new - old
    return tl.where(share < 0.5, old + share * step, new - step * (1.0 - share))


@triton.jit
def compare_kernel(
    keys, masses, tokens, cosines, slots, count,
    SIZE: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    slot, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    c = tl.arange(0, BLOCK_C)
    cosine = _cosines(keys + (row * slots + slot) * SIZE, tokens + row * count * SIZE, count, SIZE, BLOCK_C, BLOCK_N)
    cosine = tl.where(tl.load(masses + row * slots + slot) > 0, cosine, float("-inf"))
    tl.store(cosines + (row * count + c) * slots + slot, cosine, mask=c < count)


@triton.jit
def write_kernel(
    keys, values, scores, masses, usages, ages, new_keys, new_values, new_scores, wanted, cosines, written,
    slots, count, threshold,
    SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    m, c, n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_N)
    in_m = m < slots
    held = row * slots + m
    score = tl.load(scores + held, mask=in_m, other=0.0)
    mass = tl.load(masses + held, mask=in_m, other=0.0)
    usage = tl.load(usages + held, mask=in_m, other=0.0)
    age = tl.load(ages + held, mask=in_m, other=0.0)
    placed_count, merged_count, evicted_count = 0, 0, 0
    for token in range(0, count):
        offered = row * count + token
        cosine = tl.load(cosines + offered * slots + m, mask=in_m, other=float("-inf"))
        similar, nearest = tl.max(cosine, 0, return_indices=True)
        standing = tl.where(in_m, tl.where(mass > 0, score, float("-inf")), float("inf"))
        lowest, weakest = tl.min(standing, 0, return_indices=True)
        new_score = tl.load(new_scores + offered)
        is_wanted = tl.load(wanted + offered) != 0
        is_merged = is_wanted & (similar > threshold)
        is_placed = is_wanted & (is_merged == 0) & (new_score > lowest)
        if is_merged | is_placed:
            slot = tl.where(is_merged, nearest, weakest)
            chosen = m == slot
            old_mass = tl.where(is_merged, tl.sum(tl.where(chosen, mass, 0.0), 0), 0.0)
            share = tl.div_rn(1.0, old_mass + 1.0).to(keys.dtype.element_ty).to(tl.float32)
            to = (row * slots + slot) * SIZE
            for start in range(0, SIZE, BLOCK_N):
                at = start + n
                in_n = at < SIZE
                old = tl.load(keys + to + at, mask=in_n, other=0.0).to(tl.float32)
                new = tl.load(new_keys + offered * SIZE + at, mask=in_n, other=0.0).to(tl.float32)
                tl.store(keys + to + at, _lerp(old, new, share).to(keys.dtype.element_ty), mask=in_n)
                old = tl.load(values + to + at, mask=in_n, other=0.0).to(tl.float32)
                new = tl.load(new_values + offered * SIZE + at, mask=in_n, other=0.0).to(tl.float32)
                tl.store(values + to + at, _lerp(old, new, share).to(values.dtype.element_ty), mask=in_n)
            score = tl.where(chosen, tl.where(is_merged, tl.maximum(score, new_score), new_score), score)
            mass = tl.where(chosen, old_mass + 1.0, mass)
            usage = tl.where(chosen & is_placed, 0.0, usage)
            age = tl.where(chosen & is_placed, 0.0, age)
            # All threads must see the stored key before the cosines are computed from it.
            tl.debug_barrier()
            like = _cosines(keys + to, new_keys + row * count * SIZE, count, SIZE, BLOCK_C, BLOCK_N)
            tl.store(cosines + (row * count + c) * slots + slot, like, mask=c < count)
        tl.debug_barrier()
        placed_count += is_placed.to(tl.int32)
        merged_count += is_merged.to(tl.int32)
        evicted_count += (is_placed & (lowest > float("-inf"))).to(tl.int32)
    tl.store(scores + held, score, mask=in_m)
    tl.store(masses + held, mass, mask=in_m)
    tl.store(usages + held, usage, mask=in_m)
    tl.store(ages + held, age, mask=in_m)
    tl.store(written + row * 3, placed_count)
    tl.store(written + row * 3 + 1, merged_count)
    tl.store(written + row * 3 + 2, evicted_count)


def _empty_counts(keys: Tensor, *_: object) -> Tensor:
    return torch.empty((len(keys), 3), dtype=torch.int64, device=keys.device)


@kernel.custom_op("slot_write", _empty_counts, mutates=("keys", "values", "scores", "masses", "usages", "ages"))
def _write(
    keys: Tensor,
    values: Tensor,
    scores: Tensor,
    masses: Tensor,
    usages: Tensor,
    ages: Tensor,
    new_keys: Tensor,
    new_values: Tensor,
    new_scores: Tensor,
    wanted: Tensor,
    threshold: float,
) -> Tensor:
    batch, slots, heads, dim = keys.shape
    count = new_scores.shape[1]
    cosines = torch.empty((batch, count, slots), dtype=torch.float32, device=keys.device)
    written = _empty_counts(keys)
    block_c = kernel.padded(count)
    block_n = min(kernel.padded(heads * dim), _LARGEST_BLOCK, max(16, _TILE // block_c))
    sizes = {"SIZE": heads * dim, "BLOCK_C": block_c, "BLOCK_N": block_n, "num_warps": _WARPS}
    kernel.launch(compare_kernel, (slots, batch), keys, masses, new_keys, cosines, slots, count, **sizes)
    tensors = (keys, values, scores, masses, usages, ages, new_keys, new_values, new_scores, wanted, cosines, written)
    block_m = kernel.padded(slots)
    kernel.launch(write_kernel, (batch,), *tensors, slots, count, threshold, BLOCK_M=block_m, **sizes)
    return written

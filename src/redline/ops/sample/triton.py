"""Samples tokens with Triton kernels, which read the logits once and store no noise.

Each program of the first kernel finds the token with the largest sum of logit and noise in one part of a row's
vocabulary; the second kernel finds the best of the parts. The hash is computed in 32-bit arithmetic, which gives the
same bits as the reference.

N: rows, V: vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from redline.ops import kernel

_BLOCK = 4096
_WARPS = 8


def why_not(logits_NV: Tensor) -> str:
    return kernel.why_not(logits_NV)


@triton.jit
def mixed(number):
    number = (number ^ (number >> 16)) * 0x85EBCA6B
    number = (number ^ (number >> 13)) * 0xC2B2AE35
    return number ^ (number >> 16)


@triton.jit
def best_of_part_kernel(
    logits, temperature, keys, drawn, values, tokens, vocabulary, row_stride, BLOCK: tl.constexpr
):  # fmt: skip
    row, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    token = part * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocabulary
    logit = tl.load(logits + row * row_stride + token, mask=inside, other=float("-inf")).to(tl.float32)
    heat = tl.load(temperature + row).to(tl.float32)
    if heat > 0:
        place = mixed(tl.load(keys + row).to(tl.uint32) + mixed(tl.load(drawn + row).to(tl.uint32)))
        bits = mixed(place + mixed(token.to(tl.uint32)))
        uniform = ((bits >> 9).to(tl.float32) + 0.5) / 8388608.0
        logit = logit / heat - tl.log(-tl.log(uniform))
    # A part with NaN gets the value +∞, so that the second kernel returns −1 for the row.
    broken = tl.max((inside & (logit != logit)).to(tl.int32), 0)
    logit = tl.where(logit != logit, float("-inf"), logit)
    value = tl.max(logit, 0)
    first = tl.min(tl.where(logit == value, token, vocabulary), 0)
    tl.store(values + row * parts + part, tl.where(broken > 0, float("inf"), value))
    tl.store(tokens + row * parts + part, first)


@triton.jit
def best_of_row_kernel(values, tokens, out, parts, BLOCK: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    value = tl.load(values + row * parts + part, mask=part < parts, other=float("-inf"))
    token = tl.load(tokens + row * parts + part, mask=part < parts, other=2147483647)
    best = tl.max(value, 0)
    chosen = tl.min(tl.where(value == best, token, 2147483647), 0)
    is_finite = (best > float("-inf")) & (best < float("inf"))
    tl.store(out + row, tl.where(is_finite, chosen, -1).to(tl.int64))


@kernel.custom_op("sample", lambda logits, *_: logits.new_empty(len(logits), dtype=torch.int64))
def sample(logits: Tensor, temperature: Tensor, keys: Tensor, drawn: Tensor) -> Tensor:
    """Computes the same as the reference, up to the last bit of the logarithms. The op has no gradient."""
    logits = kernel.rows_contiguous(logits)
    rows, vocabulary = logits.shape
    parts = -(-vocabulary // _BLOCK)
    values = torch.empty((rows, parts), dtype=torch.float32, device=logits.device)
    tokens = torch.empty((rows, parts), dtype=torch.int32, device=logits.device)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    inputs = (logits, temperature.contiguous(), keys.contiguous(), drawn.contiguous())
    kernel.launch(
        best_of_part_kernel,
        (rows, parts),
        *inputs,
        values,
        tokens,
        vocabulary,
        logits.stride(0),
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )
    kernel.launch(best_of_row_kernel, (rows,), values, tokens, out, parts, BLOCK=kernel.padded(parts))
    return out

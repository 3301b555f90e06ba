"""Convolved heads by Triton kernels, as an operator that torch.compile sees as one node.

A program takes one head of some tokens: it reads their channels and the few before them, and writes what the memory
takes. Backward computes all of it once more, and writes the grad at each sum. A second kernel spreads the grads over
the tokens that the sums were made of, and writes the share of these in the gradient of the taps: the shares are added
up in a fixed order.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from redline.ops import kernel

INTERPRETED = kernel.INTERPRETED
# Tokens of a program of each kernel, and its warps; channels of one of the last.
FORWARD, SUMS, INPUTS = (32, 4), (32, 4), (64, 4)
COLUMNS = 128
_MOST_TAPS, _LARGEST_HEAD = 16, 256
# Below it a vector is not made a unit one; as torch.nn.functional.normalize has it.
_LEAST_NORM = tl.constexpr(1e-12)

_Outputs = tuple[Tensor, Tensor, Tensor]


def convolved_heads(
    x_BSC: Tensor, taps_TC: Tensor, recent_BTC: Tensor, heads: int, key_dim: int, documents_BS: Tensor | None = None
) -> _Outputs:
    """The same as the reference; everything between what is read and what is written is fp32."""
    return _forward(x_BSC, taps_TC, recent_BTC, heads, key_dim, documents_BS)


def why_not(x_BSC: Tensor, taps_TC: Tensor, heads: int, key_dim: int) -> str:
    """Why the kernels cannot take this, or nothing."""
    value_dim = x_BSC.shape[-1] // heads - 2 * key_dim
    if max(key_dim, value_dim) > _LARGEST_HEAD:
        return f"it takes heads of up to {_LARGEST_HEAD} channels, not {max(key_dim, value_dim)}"
    if len(taps_TC) > _MOST_TAPS:
        return f"it takes up to {_MOST_TAPS} taps, not {len(taps_TC)}"
    return kernel.why_not(x_BSC) or kernel.why_not(taps_TC)


@triton.jit
def _earlier(
    x, recent, documents, row, own, back, channel, inside, tokens, channels, token_stride,
    TAPS: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """What each of these tokens sees of the one so many before it: nothing of another document."""
    source = row - back
    exists = row < tokens
    if HAS_DOCUMENTS:
        exists = exists & (own == tl.load(documents + tl.maximum(source, 0), mask=exists, other=0))
    place = x + source.to(tl.int64)[:, None] * token_stride + channel[None, :]
    values = tl.load(place, mask=(exists & (source >= 0))[:, None] & inside[None, :], other=0.0).to(tl.float32)
    # Only the first of all programs meet tokens before the first.
    if (TAPS > 1) and (tl.program_id(0) == 0):
        held = recent + (TAPS - 1 + source).to(tl.int64)[:, None] * channels + channel[None, :]
        values += tl.load(held, mask=(exists & (source < 0))[:, None] & inside[None, :], other=0.0).to(tl.float32)
    return values


@triton.jit
def _summed(
    x, taps, recent, documents, row, own, channel, inside, tokens, channels, token_stride,
    TAPS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """Each channel's weighted sum over the last tokens."""
    total = tl.zeros((BLOCK_S, BLOCK_D), tl.float32)
    for tap in tl.static_range(0, TAPS):  # pyright: ignore[reportGeneralTypeIssues]
        weight = tl.load(taps + tap * channels + channel, mask=inside, other=0.0).to(tl.float32)
        total += weight[None, :] * _earlier(
            x, recent, documents, row, own, TAPS - 1 - tap, channel, inside, tokens, channels, token_stride,
            TAPS, HAS_DOCUMENTS,
        )  # fmt: skip
    return total


@triton.jit
def _head_forward(
    x, taps, recent, documents, output, first, head, tokens, heads, channels, token_stride,
    TAPS: tl.constexpr, WIDTH: tl.constexpr, UNIT: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)
    place = tl.arange(0, BLOCK_D)
    inside = place < WIDTH
    own = tl.load(documents + row, mask=row < tokens, other=0) if HAS_DOCUMENTS else row
    total = _summed(
        x, taps, recent, documents, row, own, first + place, inside, tokens, channels, token_stride,
        TAPS, BLOCK_S, BLOCK_D, HAS_DOCUMENTS,
    )  # fmt: skip
    active = total * tl.sigmoid(total)
    if UNIT:
        # One division for a head of a token, not one for each of its channels.
        active *= (1 / tl.maximum(tl.sqrt(tl.sum(active * active, 1)), _LEAST_NORM))[:, None]
    at = output + (row.to(tl.int64) * heads + head)[:, None] * WIDTH + place[None, :]
    tl.store(at, active.to(output.dtype.element_ty), mask=(row < tokens)[:, None] & inside[None, :])


@triton.jit
def convolved_heads_forward_kernel(
    x, taps, recent, documents, query, key, value, tokens, heads, batch_stride, token_stride,
    TAPS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(2).to(tl.int64)
    # The heads of queries (0), of keys (1) and of values (2), one after the other.
    part, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    channels = heads * (2 * KEYS + VALUES)
    x += batch * batch_stride
    recent += batch * (TAPS - 1) * channels
    documents += batch * tokens
    if part == 2:
        _head_forward(
            x, taps, recent, documents, value + batch * tokens * heads * VALUES, 2 * heads * KEYS + head * VALUES,
            head, tokens, heads, channels, token_stride, TAPS, VALUES, False, BLOCK_S, BLOCK_V, HAS_DOCUMENTS,
        )  # fmt: skip
    else:
        output = query if part == 0 else key
        _head_forward(
            x, taps, recent, documents, output + batch * tokens * heads * KEYS, (part * heads + head) * KEYS,
            head, tokens, heads, channels, token_stride, TAPS, KEYS, True, BLOCK_S, BLOCK_K, HAS_DOCUMENTS,
        )  # fmt: skip


@triton.jit
def _head_backward(
    x, taps, recent, documents, grad_output, grad_sums, first, head, tokens, heads, channels, token_stride,
    TAPS: tl.constexpr, WIDTH: tl.constexpr, UNIT: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)
    place = tl.arange(0, BLOCK_D)
    inside = place < WIDTH
    own = tl.load(documents + row, mask=row < tokens, other=0) if HAS_DOCUMENTS else row
    total = _summed(
        x, taps, recent, documents, row, own, first + place, inside, tokens, channels, token_stride,
        TAPS, BLOCK_S, BLOCK_D, HAS_DOCUMENTS,
    )  # fmt: skip
    gate = tl.sigmoid(total)
    there = (row < tokens)[:, None] & inside[None, :]
    at = grad_output + (row.to(tl.int64) * heads + head)[:, None] * WIDTH + place[None, :]
    grad = tl.load(at, mask=there, other=0.0).to(tl.float32)
    if UNIT:
        active = total * gate
        norm = tl.sqrt(tl.sum(active * active, 1))
        per_size = 1 / tl.maximum(norm, _LEAST_NORM)
        unit = active * per_size[:, None]
        along = tl.where(norm > _LEAST_NORM, tl.sum(unit * grad, 1), 0.0)
        grad = (grad - along[:, None] * unit) * per_size[:, None]
    grad *= gate * (1 + total * (1 - gate))
    target = grad_sums + row.to(tl.int64)[:, None] * channels + (first + place)[None, :]
    tl.store(target, grad.to(grad_sums.dtype.element_ty), mask=there)


@triton.jit
def convolved_heads_sums_kernel(
    x, taps, recent, documents, grad_query, grad_key, grad_value, grad_sums, tokens, heads, batch_stride, token_stride,
    TAPS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """The grad at each weighted sum."""
    batch = tl.program_id(2).to(tl.int64)
    part, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    channels = heads * (2 * KEYS + VALUES)
    x += batch * batch_stride
    recent += batch * (TAPS - 1) * channels
    documents += batch * tokens
    grad_sums += batch * tokens * channels
    if part == 2:
        _head_backward(
            x, taps, recent, documents, grad_value + batch * tokens * heads * VALUES, grad_sums,
            2 * heads * KEYS + head * VALUES, head, tokens, heads, channels, token_stride,
            TAPS, VALUES, False, BLOCK_S, BLOCK_V, HAS_DOCUMENTS,
        )  # fmt: skip
    else:
        grad_output = grad_query if part == 0 else grad_key
        _head_backward(
            x, taps, recent, documents, grad_output + batch * tokens * heads * KEYS, grad_sums,
            (part * heads + head) * KEYS, head, tokens, heads, channels, token_stride,
            TAPS, KEYS, True, BLOCK_S, BLOCK_K, HAS_DOCUMENTS,
        )  # fmt: skip


@triton.jit
def convolved_heads_inputs_kernel(
    x, taps, recent, documents, grad_sums, grad_x, grad_recent, grad_taps, tokens, channels, batch_stride, token_stride,
    TAPS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """The grad at each input, and at those before the first, of the sums that it is in; and what these inputs have of
    the gradient of the taps."""
    batch = tl.program_id(2).to(tl.int64)
    x += batch * batch_stride
    recent += batch * (TAPS - 1) * channels
    documents += batch * tokens
    grad_sums += batch * tokens * channels
    grad_x += batch * tokens * channels
    grad_recent += batch * (TAPS - 1) * channels
    grad_taps += (batch * tl.num_programs(0) + tl.program_id(0)) * TAPS * channels
    row = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S) - (TAPS - 1)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = channel < channels
    exists = row < tokens
    there = (exists & (row >= 0))[:, None] & inside[None, :]
    before = (row < 0)[:, None] & inside[None, :]
    held = (TAPS - 1 + row).to(tl.int64)[:, None] * channels + channel[None, :]
    place = row.to(tl.int64)[:, None] * channels + channel[None, :]
    values = tl.load(x + row.to(tl.int64)[:, None] * token_stride + channel[None, :], mask=there, other=0.0)
    values = values.to(tl.float32)
    # Only the first of all programs meet tokens before the first.
    if (TAPS > 1) and (tl.program_id(0) == 0):
        values += tl.load(recent + held, mask=before, other=0.0).to(tl.float32)
    own = tl.load(documents + tl.maximum(row, 0), mask=exists, other=0) if HAS_DOCUMENTS else row
    total = tl.zeros((BLOCK_S, BLOCK_C), tl.float32)
    for back in tl.static_range(0, TAPS):  # pyright: ignore[reportGeneralTypeIssues]
        later = row + back
        grads = (later >= 0) & (later < tokens)
        if HAS_DOCUMENTS:
            grads = grads & (own == tl.load(documents + later, mask=grads, other=0))
        tap = (TAPS - 1 - back) * channels + channel
        grad = tl.load(grad_sums + place + back * channels, mask=grads[:, None] & inside[None, :], other=0.0)
        grad = grad.to(tl.float32)
        total += tl.load(taps + tap, mask=inside, other=0.0).to(tl.float32)[None, :] * grad
        tl.store(grad_taps + tap, tl.sum(values * grad, 0), mask=inside)
    tl.store(grad_x + place, total.to(grad_x.dtype.element_ty), mask=there)
    if (TAPS > 1) and (tl.program_id(0) == 0):
        tl.store(grad_recent + held, total.to(grad_recent.dtype.element_ty), mask=before)


@torch.library.custom_op("redline::convolved_heads", mutates_args=())
def _forward(
    x: Tensor, taps: Tensor, recent: Tensor, heads: int, key_dim: int, documents: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    outputs = _rooms(x, taps, heads, key_dim)
    x, taps, recent = _channels_together(x), taps.contiguous(), recent.contiguous()
    batch, tokens, channels = x.shape
    if not batch * tokens:
        return outputs
    kernel.launch(
        convolved_heads_forward_kernel,
        (-(-tokens // FORWARD[0]), 3 * heads, batch),
        *(x, taps, recent, _documents(documents, x), *outputs, tokens, heads, *x.stride()[:2]),
        **_constants(len(taps), channels, heads, key_dim, FORWARD),
        HAS_DOCUMENTS=documents is not None,
    )
    return outputs


@_forward.register_fake
def _(
    x: Tensor, taps: Tensor, recent: Tensor, heads: int, key_dim: int, documents: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    return _rooms(x, taps, heads, key_dim)


@torch.library.custom_op("redline::convolved_heads_backward", mutates_args=())
def _backward(
    x: Tensor,
    taps: Tensor,
    recent: Tensor,
    heads: int,
    key_dim: int,
    documents: Tensor | None,
    grad_query: Tensor,
    grad_key: Tensor,
    grad_value: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_x, grad_recent = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (x, recent))
    batch, tokens, channels = x.shape
    if not batch * tokens:
        return grad_x, torch.zeros_like(taps), grad_recent.zero_()
    given = _documents(documents, x)
    x, taps, recent = _channels_together(x), taps.contiguous(), recent.contiguous()
    block, warps = INPUTS
    blocks = -(-(tokens + len(taps) - 1) // block)
    grad_sums = torch.empty((batch, tokens, channels), dtype=grad_query.dtype, device=x.device)
    shares = torch.empty((batch * blocks, len(taps), channels), dtype=torch.float32, device=x.device)
    grads = (grad.contiguous() for grad in (grad_query, grad_key, grad_value))
    kernel.launch(
        convolved_heads_sums_kernel,
        (-(-tokens // SUMS[0]), 3 * heads, batch),
        *(x, taps, recent, given, *grads, grad_sums, tokens, heads, *x.stride()[:2]),
        **_constants(len(taps), channels, heads, key_dim, SUMS),
        HAS_DOCUMENTS=documents is not None,
    )
    kernel.launch(
        convolved_heads_inputs_kernel,
        (blocks, -(-channels // COLUMNS), batch),
        *(x, taps, recent, given, grad_sums, grad_x, grad_recent, shares, tokens, channels, *x.stride()[:2]),
        TAPS=len(taps),
        BLOCK_S=block,
        BLOCK_C=COLUMNS,
        HAS_DOCUMENTS=documents is not None,
        num_warps=warps,
    )
    return grad_x, shares.sum(0).to(taps.dtype), grad_recent


@_backward.register_fake
def _(
    x: Tensor,
    taps: Tensor,
    recent: Tensor,
    heads: int,
    key_dim: int,
    documents: Tensor | None,
    grad_query: Tensor,
    grad_key: Tensor,
    grad_value: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (x, taps, recent))  # pyright: ignore[reportReturnType]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: _Outputs) -> None:
    x, taps, recent, ctx.heads, ctx.key_dim, documents = inputs
    ctx.save_for_backward(x, taps, recent, documents)


def _differentiate(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    x, taps, recent, documents = ctx.saved_tensors
    return *_backward(x, taps, recent, ctx.heads, ctx.key_dim, documents, *grads), None, None, None


_forward.register_autograd(_differentiate, setup_context=_setup_context)


def _constants(taps: int, channels: int, heads: int, key_dim: int, tile: tuple[int, int]) -> dict[str, object]:
    value_dim = channels // heads - 2 * key_dim
    blocks = {"BLOCK_S": tile[0], "BLOCK_K": kernel.padded(key_dim), "BLOCK_V": kernel.padded(value_dim)}
    return {"TAPS": taps, "KEYS": key_dim, "VALUES": value_dim, **blocks, "num_warps": tile[1]}


def _rooms(x: Tensor, taps: Tensor, heads: int, key_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    batch, tokens, channels = x.shape
    dtype, value_dim = torch.promote_types(x.dtype, taps.dtype), channels // heads - 2 * key_dim
    query, key, value = (
        torch.empty((batch, tokens, heads, dim), dtype=dtype, device=x.device) for dim in (key_dim, key_dim, value_dim)
    )
    return query, key, value


def _documents(documents: Tensor | None, x: Tensor) -> Tensor:
    # Where there are none nothing is read, but a kernel wants a pointer.
    return x if documents is None else documents.contiguous()


def _channels_together(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()

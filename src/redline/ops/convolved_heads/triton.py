"""Convolved heads with Triton kernels, registered as a custom op for torch.compile.

A forward program computes one head of a block of tokens. Backward recomputes the forward pass and writes the gradient
of each convolution sum. From these a second kernel computes the gradients of the inputs, and partial sums of the
gradient of the taps, which are added in a fixed order.

B: sequences, S: tokens, C: channels, T: taps, K and V: channels of a key and a value, D: channels of the current head.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from redline.ops import kernel

# The tokens and warps of a program of each kernel, and the channels of a program of the inputs kernel.
FORWARD, SUMS, INPUTS = (32, 4), (32, 4), (64, 4)
COLUMNS = 128
_MOST_TAPS, _LARGEST_HEAD = 16, 256
# The smallest norm that vectors are divided by, as in torch.nn.functional.normalize.
_LEAST_NORM = tl.constexpr(1e-12)


def why_not(x_BSC: Tensor, taps_TC: Tensor, heads: int, key_dim: int) -> str:
    value_dim = x_BSC.shape[-1] // heads - 2 * key_dim
    if max(key_dim, value_dim) > _LARGEST_HEAD:
        return f"heads may have at most {_LARGEST_HEAD} channels, not {max(key_dim, value_dim)}"
    if len(taps_TC) > _MOST_TAPS:
        return f"at most {_MOST_TAPS} taps are supported, not {len(taps_TC)}"
    return kernel.why_not(x_BSC) or kernel.why_not(taps_TC)


@triton.jit
def _load_earlier(
    x, recent, documents, row, own, back, channel, inside, tokens, channels, token_stride,
    TAPS: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """Loads the inputs `back` tokens before each of these tokens, with zeros if they belong to another document."""
    source = row - back
    exists = row < tokens
    if HAS_DOCUMENTS:
        exists = exists & (own == tl.load(documents + tl.maximum(source, 0), mask=exists, other=0))
    offset = x + source.to(tl.int64)[:, None] * token_stride + channel[None, :]
    values = tl.load(offset, mask=(exists & (source >= 0))[:, None] & inside[None, :], other=0.0).to(tl.float32)
    # Only the first block of tokens needs inputs from before the first token.
    if (TAPS > 1) and (tl.program_id(0) == 0):
        held = recent + (TAPS - 1 + source).to(tl.int64)[:, None] * channels + channel[None, :]
        values += tl.load(held, mask=(exists & (source < 0))[:, None] & inside[None, :], other=0.0).to(tl.float32)
    return values


@triton.jit
def _convolve(
    x, taps, recent, documents, row, own, channel, inside, tokens, channels, token_stride,
    TAPS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """Returns the convolution of each channel over a token and the TAPS - 1 tokens before it."""
    total = tl.zeros((BLOCK_S, BLOCK_D), tl.float32)
    for tap in tl.static_range(0, TAPS):
        weight = tl.load(taps + tap * channels + channel, mask=inside, other=0.0).to(tl.float32)
        total += weight[None, :] * _load_earlier(
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
    offset = tl.arange(0, BLOCK_D)
    inside = offset < WIDTH
    own = tl.load(documents + row, mask=row < tokens, other=0) if HAS_DOCUMENTS else row
    total = _convolve(
        x, taps, recent, documents, row, own, first + offset, inside, tokens, channels, token_stride,
        TAPS, BLOCK_S, BLOCK_D, HAS_DOCUMENTS,
    )  # fmt: skip
    active = total * tl.sigmoid(total)
    if UNIT:
        # Multiplies by the reciprocal: one division per head instead of one per channel.
        active *= (1 / tl.maximum(tl.sqrt(tl.sum(active * active, 1)), _LEAST_NORM))[:, None]
    at = output + (row.to(tl.int64) * heads + head)[:, None] * WIDTH + offset[None, :]
    tl.store(at, active.to(output.dtype.element_ty), mask=(row < tokens)[:, None] & inside[None, :])


@triton.jit
def convolved_heads_forward_kernel(
    x, taps, recent, documents, query, key, value, tokens, heads, batch_stride, token_stride,
    TAPS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(2).to(tl.int64)
    # Part 0 is the queries, part 1 the keys, and part 2 the values.
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
    offset = tl.arange(0, BLOCK_D)
    inside = offset < WIDTH
    own = tl.load(documents + row, mask=row < tokens, other=0) if HAS_DOCUMENTS else row
    total = _convolve(
        x, taps, recent, documents, row, own, first + offset, inside, tokens, channels, token_stride,
        TAPS, BLOCK_S, BLOCK_D, HAS_DOCUMENTS,
    )  # fmt: skip
    gate = tl.sigmoid(total)
    mask = (row < tokens)[:, None] & inside[None, :]
    at = grad_output + (row.to(tl.int64) * heads + head)[:, None] * WIDTH + offset[None, :]
    grad = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    if UNIT:
        active = total * gate
        norm = tl.sqrt(tl.sum(active * active, 1))
        per_size = 1 / tl.maximum(norm, _LEAST_NORM)
        unit = active * per_size[:, None]
        along = tl.where(norm > _LEAST_NORM, tl.sum(unit * grad, 1), 0.0)
        grad = (grad - along[:, None] * unit) * per_size[:, None]
    grad *= gate * (1 + total * (1 - gate))
    target = grad_sums + row.to(tl.int64)[:, None] * channels + (first + offset)[None, :]
    tl.store(target, grad.to(grad_sums.dtype.element_ty), mask=mask)


@triton.jit
def convolved_heads_sums_kernel(
    x, taps, recent, documents, grad_query, grad_key, grad_value, grad_sums, tokens, heads, batch_stride, token_stride,
    TAPS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """Computes the gradient of each convolution sum."""
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
    """Computes the gradients of the inputs, of the recent inputs, and partial sums of the gradient of the taps."""
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
    mask = (exists & (row >= 0))[:, None] & inside[None, :]
    before = (row < 0)[:, None] & inside[None, :]
    held = (TAPS - 1 + row).to(tl.int64)[:, None] * channels + channel[None, :]
    offset = row.to(tl.int64)[:, None] * channels + channel[None, :]
    values = tl.load(x + row.to(tl.int64)[:, None] * token_stride + channel[None, :], mask=mask, other=0.0)
    values = values.to(tl.float32)
    # Only the first block of tokens needs inputs from before the first token.
    if (TAPS > 1) and (tl.program_id(0) == 0):
        values += tl.load(recent + held, mask=before, other=0.0).to(tl.float32)
    own = tl.load(documents + tl.maximum(row, 0), mask=exists, other=0) if HAS_DOCUMENTS else row
    total = tl.zeros((BLOCK_S, BLOCK_C), tl.float32)
    for back in tl.static_range(0, TAPS):
        later = row + back
        in_document = (later >= 0) & (later < tokens)
        if HAS_DOCUMENTS:
            in_document = in_document & (own == tl.load(documents + later, mask=in_document, other=0))
        tap = (TAPS - 1 - back) * channels + channel
        grad = tl.load(grad_sums + offset + back * channels, mask=in_document[:, None] & inside[None, :], other=0.0)
        grad = grad.to(tl.float32)
        total += tl.load(taps + tap, mask=inside, other=0.0).to(tl.float32)[None, :] * grad
        tl.store(grad_taps + tap, tl.sum(values * grad, 0), mask=inside)
    tl.store(grad_x + offset, total.to(grad_x.dtype.element_ty), mask=mask)
    if (TAPS > 1) and (tl.program_id(0) == 0):
        tl.store(grad_recent + held, total.to(grad_recent.dtype.element_ty), mask=before)


def _empty_outputs(x: Tensor, taps: Tensor, _: Tensor, heads: int, key_dim: int, *others: object) -> list[Tensor]:
    batch, tokens, channels = x.shape
    dtype, value_dim = torch.promote_types(x.dtype, taps.dtype), channels // heads - 2 * key_dim
    shapes = [(batch, tokens, heads, dim) for dim in (key_dim, key_dim, value_dim)]
    return [torch.empty(shape, dtype=dtype, device=x.device) for shape in shapes]


@kernel.custom_op("convolved_heads", lambda *inputs: tuple(_empty_outputs(*inputs)))
def convolved_heads(
    x: Tensor, taps: Tensor, recent: Tensor, heads: int, key_dim: int, documents: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the same as the reference. All intermediate values are fp32."""
    outputs = query, key, value = _empty_outputs(x, taps, recent, heads, key_dim)
    x, taps, recent = kernel.rows_contiguous(x), taps.contiguous(), recent.contiguous()
    batch, tokens, channels = x.shape
    if not batch * tokens:
        return query, key, value
    kernel.launch(
        convolved_heads_forward_kernel,
        (-(-tokens // FORWARD[0]), 3 * heads, batch),
        *(x, taps, recent, _documents(documents, x), *outputs, tokens, heads, *x.stride()[:2]),
        **_constants(len(taps), channels, heads, key_dim, FORWARD),
        HAS_DOCUMENTS=documents is not None,
    )
    return query, key, value


@kernel.custom_op("convolved_heads_backward", lambda *inputs: tuple(kernel.empty_like(one) for one in inputs[:3]))
def _backward(
    x: Tensor,
    taps: Tensor,
    recent: Tensor,
    documents: Tensor | None,
    grad_query: Tensor,
    grad_key: Tensor,
    grad_value: Tensor,
    heads: int,
    key_dim: int,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_x, grad_recent = kernel.empty_like(x), kernel.empty_like(recent)
    batch, tokens, channels = x.shape
    if not batch * tokens:
        return grad_x, torch.zeros_like(taps), grad_recent.zero_()
    given = _documents(documents, x)
    x, taps, recent = kernel.rows_contiguous(x), taps.contiguous(), recent.contiguous()
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


kernel.differentiate(convolved_heads, lambda ctx, *grads: _backward(*ctx.saved_tensors, *grads, *ctx.options))


def _constants(taps: int, channels: int, heads: int, key_dim: int, tile: tuple[int, int]) -> dict[str, object]:
    value_dim = channels // heads - 2 * key_dim
    blocks = {"BLOCK_S": tile[0], "BLOCK_K": kernel.padded(key_dim), "BLOCK_V": kernel.padded(value_dim)}
    return {"TAPS": taps, "KEYS": key_dim, "VALUES": value_dim, **blocks, "num_warps": tile[1]}


def _documents(documents: Tensor | None, x: Tensor) -> Tensor:
    # Without documents the kernel reads nothing through this argument, but it needs a pointer.
    return x if documents is None else documents.contiguous()

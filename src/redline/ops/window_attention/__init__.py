"""Window attention of Swin transformers, with a relative position bias and shifted windows.

`sdpa.py` uses PyTorch's fused attention, and `triton.py` has separate kernels.

B: images, H and W: height and width in tokens, C: channels, R: rows of the bias table. In `table_RH`, H is the heads.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from redline.errors import ModelError
from redline.ops.checks import check_same_device
from redline.ops.dispatch import kernels, select
from redline.ops.window_attention import reference, sdpa
from redline.ops.window_attention.reference import compact_bias_table, expand_bias_table

__all__ = [
    "IMPLEMENTATIONS",
    "auto_implementation",
    "expand_bias_table",
    "window_attention",
    "window_attention_expanded",
]

IMPLEMENTATIONS = ("auto", "reference", "sdpa", "triton")


def window_attention(
    qkv_BHW3C: Tensor, table_RH: Tensor, window: int, shift: int = 0, implementation: str = "auto"
) -> Tensor:
    """Returns the attention inside each window, (B, H, W, C). `auto` uses the fastest supported implementation."""
    _check(qkv_BHW3C, table_RH, table_RH.shape, window, shift)
    chosen = _choose(implementation, qkv_BHW3C, table_RH, table_RH.shape[-1], window)
    module = {"sdpa": sdpa, "reference": reference}.get(chosen)
    return (module or kernels("window_attention")).window_attention(qkv_BHW3C, table_RH, window, shift)


def window_attention_expanded(
    qkv_BHW3C: Tensor, bias_HRWW: Tensor, shift: int = 0, implementation: str = "auto"
) -> Tensor:
    """Computes `window_attention` for inference, with a table that `expand_bias_table` expanded once beforehand."""
    heads, rows, window, _ = bias_HRWW.shape
    _check(qkv_BHW3C, bias_HRWW, (rows**2, heads), window, shift)
    if _choose(implementation, qkv_BHW3C, bias_HRWW, heads, window) != "triton":
        return window_attention(qkv_BHW3C, compact_bias_table(bias_HRWW), window, shift, implementation)
    return kernels("window_attention").window_attention_expanded(qkv_BHW3C, bias_HRWW, shift)


def auto_implementation(qkv_BHW3C: Tensor, table_RH: Tensor, window: int) -> str:
    """Returns the implementation that `auto` selects for these tensors."""
    return _choose("auto", qkv_BHW3C, table_RH, table_RH.shape[-1], window)


def _choose(requested: str, qkv_BHW3C: Tensor, biases: Tensor, heads: int, window: int) -> str:
    # PyTorch's fused CPU attention has no gradient for masks, and its own fallback is slower than the reference.
    trains_table = biases.requires_grad and torch.is_grad_enabled()
    fallback = "reference" if trains_table and not qkv_BHW3C.is_cuda else "sdpa"
    supported = (qkv_BHW3C, heads, window)
    return select("window_attention", requested, *supported, implementations=IMPLEMENTATIONS, fallback=fallback)


def _check(qkv_BHW3C: Tensor, biases: Tensor, table_shape: Sequence[int], window: int, shift: int) -> None:
    op = "window_attention"
    if qkv_BHW3C.ndim != 4 or len(table_shape) != 2:
        shapes = f"{tuple(qkv_BHW3C.shape)} and {tuple(table_shape)}"
        raise ModelError(f"{op}: qkv_BHW3C must be (B, H, W, 3·C) and table_RH (rows, heads), not {shapes}.")
    height, width, channels = qkv_BHW3C.shape[1:]
    rows, heads = table_shape
    if window < 1 or height % window or width % window:
        raise ModelError(f"{op}: {height} × {width} tokens cannot be divided into windows of {window} × {window}.")
    if rows != (2 * window - 1) ** 2:
        raise ModelError(f"{op}: table_RH must have {(2 * window - 1) ** 2} rows for windows of {window}, not {rows}.")
    if heads < 1 or channels % (3 * heads):
        raise ModelError(f"{op}: {channels} channels cannot be split into queries, keys and values of {heads} heads.")
    if not 0 <= shift < window:
        raise ModelError(f"{op}: shift must be from 0 to {window - 1} for windows of {window}, not {shift}.")
    check_same_device(op, qkv_BHW3C=qkv_BHW3C, table_RH=biases)

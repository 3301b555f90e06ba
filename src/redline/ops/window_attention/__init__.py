"""Window attention with relative bias and shift; `reference.py` is its specification, the others are faster."""

from collections.abc import Sequence

import torch
from torch import Tensor

from redline.errors import ModelError
from redline.ops.dispatch import choose
from redline.ops.window_attention import reference, sdpa
from redline.ops.window_attention.bias_table import compact_bias_table, expand_bias_table

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
    """Attention inside each window; gives (B, H, W, C). `auto` takes the fastest that can run."""
    _check(qkv_BHW3C, table_RH, table_RH.shape, window, shift)
    chosen = _choose(implementation, qkv_BHW3C, table_RH, table_RH.shape[-1], window)
    if chosen == "triton":
        # Imported late: Triton takes a while, and only GPUs need it.
        from redline.ops.window_attention import triton

        return triton.window_attention(qkv_BHW3C, table_RH, window, shift)
    if chosen == "sdpa":
        return sdpa.window_attention(qkv_BHW3C, table_RH, window, shift)
    return reference.window_attention(qkv_BHW3C, table_RH, window, shift)


def window_attention_expanded(
    qkv_BHW3C: Tensor, bias_HRWW: Tensor, shift: int = 0, implementation: str = "auto"
) -> Tensor:
    """The same for inference, with the table `spread` beforehand: once, instead of at each call."""
    heads, rows, window, _ = bias_HRWW.shape
    _check(qkv_BHW3C, bias_HRWW, (rows**2, heads), window, shift)
    if _choose(implementation, qkv_BHW3C, bias_HRWW, heads, window) != "triton":
        return window_attention(qkv_BHW3C, compact_bias_table(bias_HRWW), window, shift, implementation)
    from redline.ops.window_attention import triton

    return triton.window_attention_expanded(qkv_BHW3C, bias_HRWW, shift)


def auto_implementation(qkv_BHW3C: Tensor, table_RH: Tensor, window: int) -> str:
    """What `auto` takes for these."""
    return _choose("auto", qkv_BHW3C, table_RH, table_RH.shape[-1], window)


def _choose(asked: str, qkv_BHW3C: Tensor, biases: Tensor, heads: int, window: int) -> str:
    def why_not() -> str:
        from redline.ops.window_attention import triton

        return triton.why_not(qkv_BHW3C, heads, window)

    # torch's fused attention on CPUs gives masks no gradient, and what it does instead is slower than the reference.
    trains_table = biases.requires_grad and torch.is_grad_enabled()
    otherwise = "reference" if trains_table and not qkv_BHW3C.is_cuda else "sdpa"
    return choose("window attention", asked, qkv_BHW3C.device, why_not, IMPLEMENTATIONS, otherwise)


def _check(qkv_BHW3C: Tensor, biases: Tensor, of_table: Sequence[int], window: int, shift: int) -> None:
    if qkv_BHW3C.ndim != 4 or len(of_table) != 2:
        shapes = f"{tuple(qkv_BHW3C.shape)} and {tuple(of_table)}"
        raise ModelError(f"window attention takes (B, H, W, 3·C) and a table (rows, heads), not {shapes}.")
    height, width, channels = qkv_BHW3C.shape[1:]
    rows, heads = of_table
    if window < 1 or height % window or width % window:
        raise ModelError(f"a picture of {height} × {width} tokens does not divide into windows of {window} × {window}.")
    if rows != (2 * window - 1) ** 2:
        raise ModelError(f"a window of {window} needs a bias table of {(2 * window - 1) ** 2} rows, not {rows}.")
    if heads < 1 or channels % (3 * heads):
        raise ModelError(f"{channels} channels cannot be queries, keys and values of {heads} heads.")
    if not 0 <= shift < window:
        raise ModelError(f"windows of {window} can be shifted by 0 to {window - 1}, not by {shift}.")
    if qkv_BHW3C.device != biases.device:
        raise ModelError(f"the bias table is on {biases.device}, but the tokens are on {qkv_BHW3C.device}.")

"""Window attention with relative bias and shift; `reference.py` is its specification, the others are faster."""

import warnings
from importlib.util import find_spec

import torch
from torch import Tensor

from redline.errors import MachineError, ModelError
from redline.ops.window_attention import reference, sdpa

__all__ = ["IMPLEMENTATIONS", "fastest", "window_attention"]

IMPLEMENTATIONS = ("auto", "reference", "sdpa", "triton")
_TRITON_INSTALLED = find_spec("triton") is not None


def window_attention(
    qkv_BHW3C: Tensor, table_RH: Tensor, window: int, shift: int = 0, implementation: str = "auto"
) -> Tensor:
    """Attention inside each window; gives (B, H, W, C). `auto` takes the fastest that can run."""
    _check(qkv_BHW3C, table_RH, window, shift)
    if implementation == "auto":
        implementation = fastest(qkv_BHW3C, table_RH, window)
    elif implementation == "triton":
        reason = _why_not_triton(qkv_BHW3C, table_RH, window)
        if reason:
            raise MachineError(f"window attention by Triton cannot run: {reason}.")
    if implementation == "triton":
        # Imported late: Triton takes a while, and only GPUs need it.
        from redline.ops.window_attention import triton

        return triton.window_attention(qkv_BHW3C, table_RH, window, shift)
    if implementation == "sdpa":
        return sdpa.window_attention(qkv_BHW3C, table_RH, window, shift)
    if implementation == "reference":
        return reference.window_attention(qkv_BHW3C, table_RH, window, shift)
    known = ", ".join(IMPLEMENTATIONS)
    raise ModelError(f"window attention has no implementation {implementation!r}: it has {known}.")


def fastest(qkv_BHW3C: Tensor, table_RH: Tensor, window: int) -> str:
    """What `auto` takes for these."""
    if qkv_BHW3C.is_cuda:
        if not _why_not_triton(qkv_BHW3C, table_RH, window):
            return "triton"
        if not _TRITON_INSTALLED and not torch.compiler.is_compiling():
            warnings.warn("window attention runs slower without Triton: pip install triton", stacklevel=3)
    # torch's fused attention on CPUs gives masks no gradient, and what it does instead is slower than the reference.
    elif table_RH.requires_grad and torch.is_grad_enabled():
        return "reference"
    return "sdpa"


def _why_not_triton(qkv_BHW3C: Tensor, table_RH: Tensor, window: int) -> str:
    if not _TRITON_INSTALLED:
        return "it is not installed: pip install triton"
    from redline.ops.window_attention import triton

    return triton.why_not(qkv_BHW3C, table_RH, window)


def _check(qkv_BHW3C: Tensor, table_RH: Tensor, window: int, shift: int) -> None:
    if qkv_BHW3C.ndim != 4 or table_RH.ndim != 2:
        shapes = f"{tuple(qkv_BHW3C.shape)} and {tuple(table_RH.shape)}"
        raise ModelError(f"window attention takes (B, H, W, 3·C) and a table (rows, heads), not {shapes}.")
    height, width, channels = qkv_BHW3C.shape[1:]
    rows, heads = table_RH.shape
    if window < 1 or height % window or width % window:
        raise ModelError(f"a picture of {height} × {width} tokens does not divide into windows of {window} × {window}.")
    if rows != (2 * window - 1) ** 2:
        raise ModelError(f"a window of {window} needs a bias table of {(2 * window - 1) ** 2} rows, not {rows}.")
    if heads < 1 or channels % (3 * heads):
        raise ModelError(f"{channels} channels cannot be queries, keys and values of {heads} heads.")
    if not 0 <= shift < window:
        raise ModelError(f"windows of {window} can be shifted by 0 to {window - 1}, not by {shift}.")
    if qkv_BHW3C.device != table_RH.device:
        raise ModelError(f"the bias table is on {table_RH.device}, but the tokens are on {qkv_BHW3C.device}.")

"""Queries, keys and values of a layer of neural memory, of what one projection gives: a short causal convolution of
each channel, SiLU, and unit queries and keys; `reference.py` is the specification, `triton.py` is faster.

B: sequences, S: tokens, C: channels, T: taps, H: heads with keys of K and values of V channels; C = H · (2K + V).
"""

import torch
from torch import Tensor

from redline.errors import ModelError
from redline.ops.convolved_heads import reference
from redline.ops.dispatch import choose

__all__ = ["convolved_heads"]


def convolved_heads(
    x_BSC: Tensor,
    taps_TC: Tensor,
    recent_BTC: Tensor,
    heads: int,
    key_dim: int,
    documents_BS: Tensor | None = None,
    implementation: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """(B, S, H, K) twice and (B, S, H, V). `recent_BTC` are the T - 1 inputs before the first token, of its document.

    The first H · K channels are queries, the next keys, the rest values.
    """
    _check(x_BSC, taps_TC, recent_BTC, heads, key_dim, documents_BS)
    arguments = (x_BSC, taps_TC, recent_BTC, heads, key_dim, documents_BS)

    def why_not() -> str:
        from redline.ops.convolved_heads import triton

        return triton.why_not(x_BSC, taps_TC, heads, key_dim)

    if choose("convolved heads", implementation, x_BSC.device, why_not) == "triton":
        from redline.ops.convolved_heads import triton

        return triton.convolved_heads(*arguments)
    return reference.convolved_heads(*arguments)


def _check(
    x_BSC: Tensor, taps_TC: Tensor, recent_BTC: Tensor, heads: int, key_dim: int, documents_BS: Tensor | None
) -> None:
    x, taps, recent = (tuple(t.shape) for t in (x_BSC, taps_TC, recent_BTC))
    if len(x) != 3 or len(taps) != 2 or taps[0] < 1 or taps[1] != x[2] or recent != (x[0], taps[0] - 1, x[2]):
        raise ModelError(f"convolved heads cannot join tokens {x}, taps {taps} and the tokens before them {recent}.")
    values = x[2] - 2 * heads * key_dim
    if heads < 1 or key_dim < 1 or values < heads or values % heads:
        raise ModelError(f"{x[2]} channels cannot be {heads} heads with keys of {key_dim} channels and values.")
    if not all(t.is_floating_point() for t in (x_BSC, taps_TC, recent_BTC)):
        raise ModelError("convolved heads takes floating-point numbers.")
    tensors = [taps_TC, recent_BTC]
    if documents_BS is not None:
        tensors.append(documents_BS)
        if tuple(documents_BS.shape) != x[:2] or documents_BS.dtype not in (torch.int32, torch.int64):
            given = f"{tuple(documents_BS.shape)} in {documents_BS.dtype}"
            raise ModelError(f"convolved heads takes a whole number for each of {x[0]} × {x[1]} tokens, not {given}.")
    for tensor in tensors:
        if tensor.device != x_BSC.device:
            raise ModelError(f"convolved heads' inputs are on {x_BSC.device} and on {tensor.device}.")

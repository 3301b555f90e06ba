"""Queries, keys and values of a neural memory layer from one projection.

Applies a short causal convolution to each channel, then SiLU, and normalizes queries and keys to unit length.
`reference.py` is the specification in plain PyTorch; `triton.py` has the fused kernels.

B: sequences, S: tokens, C: channels, T: taps, H: heads with keys of K and values of V channels; C = H · (2K + V).
"""

from torch import Tensor

from redline.errors import ModelError
from redline.ops.checks import check_floating, check_integers, check_same_device, check_shape
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
    """Returns queries and keys (B, S, H, K) and values (B, S, H, V).

    The first H · K channels are queries, the next H · K keys, the rest values. `recent_BTC` holds the T - 1 inputs
    before the first token, which belong to its document.
    """
    _check(x_BSC, taps_TC, recent_BTC, heads, key_dim, documents_BS)
    arguments = (x_BSC, taps_TC, recent_BTC, heads, key_dim, documents_BS)

    def why_not() -> str:
        return _triton().why_not(x_BSC, taps_TC, heads, key_dim)

    if choose("convolved_heads", implementation, x_BSC.device, why_not) == "triton":
        return _triton().convolved_heads(*arguments)
    return reference.convolved_heads(*arguments)


def _triton():
    from redline.ops.convolved_heads import triton  # imports Triton

    return triton


def _check(
    x_BSC: Tensor, taps_TC: Tensor, recent_BTC: Tensor, heads: int, key_dim: int, documents_BS: Tensor | None
) -> None:
    op, x, taps = "convolved_heads", tuple(x_BSC.shape), tuple(taps_TC.shape)
    if len(x) != 3 or len(taps) != 2 or taps[0] < 1 or taps[1] != x[2]:
        raise ModelError(f"{op}: x_BSC must be (B, S, C) and taps_TC (T, C) with T of at least 1, not {x} and {taps}.")
    check_shape(op, "recent_BTC", recent_BTC, (x[0], taps[0] - 1, x[2]))
    values = x[2] - 2 * heads * key_dim
    if heads < 1 or key_dim < 1 or values < heads or values % heads:
        raise ModelError(
            f"{op}: {x[2]} channels cannot be split into {heads} heads with queries and keys of {key_dim} channels and "
            "values of equal size."
        )
    check_floating(op, x_BSC=x_BSC, taps_TC=taps_TC, recent_BTC=recent_BTC)
    if documents_BS is not None:
        check_integers(op, "documents_BS", documents_BS, x[:2])
    check_same_device(op, x_BSC=x_BSC, taps_TC=taps_TC, recent_BTC=recent_BTC, documents_BS=documents_BS)

"""Computes queries, keys and values of a neural memory layer from one projection.

Applies a short causal convolution to each channel, then SiLU, and normalizes queries and keys to unit length.
B: sequences, S: tokens, C: channels, T: taps, H: heads with keys of K and values of V channels; C = H · (2K + V).
"""

from torch import Tensor

from redline.errors import ModelError
from redline.ops.checks import check_floating, check_integer, check_same_device, check_shape, check_sizes
from redline.ops.convolved_heads import reference
from redline.ops.dispatch import run


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
    before the first token, of the same document as this token.
    """
    op = "convolved_heads"
    sizes = check_sizes(op, x_BSC=x_BSC, taps_TC=taps_TC, documents_BS=documents_BS)
    if sizes["T"] < 1:
        raise ModelError(f"{op}: taps_TC must have at least one tap, not {tuple(taps_TC.shape)}.")
    check_shape(op, "recent_BTC", recent_BTC, (sizes["B"], sizes["T"] - 1, sizes["C"]))
    values = sizes["C"] - 2 * heads * key_dim
    if heads < 1 or key_dim < 1 or values < heads or values % heads:
        raise ModelError(
            f"{op}: {sizes['C']} channels cannot be split into {heads} heads with queries and keys of {key_dim} "
            "channels, and values of one size for all heads."
        )
    check_floating(op, x_BSC=x_BSC, taps_TC=taps_TC, recent_BTC=recent_BTC)
    if documents_BS is not None:
        check_integer(op, "documents_BS", documents_BS)
    check_same_device(op, x_BSC=x_BSC, taps_TC=taps_TC, recent_BTC=recent_BTC, documents_BS=documents_BS)
    arguments = (x_BSC, taps_TC, recent_BTC, heads, key_dim, documents_BS)
    supported = (x_BSC, taps_TC, heads, key_dim)
    return run(op, implementation, supported, reference.convolved_heads, *arguments)

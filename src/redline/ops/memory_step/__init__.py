"""One decoding step of a neural memory layer: all operations between its projections, for one token per sequence.

The reference takes about thirty kernel launches, `triton.py` one. The op modifies nothing in place.

B: sequences, H: heads, K: channels of a key, V: channels of a value, C = H · (2K + V), T: taps, G = H · V.
"""

from torch import Tensor

from redline.ops.checks import check_shape, check_sizes
from redline.ops.dispatch import run
from redline.ops.memory_step import reference
from redline.ops.memory_step.reference import Learned, Projected

__all__ = ["Learned", "Projected", "memory_step"]


def memory_step(
    token: Projected,
    learned: Learned,
    recent_BTC: Tensor,
    state_BHKV: Tensor,
    eps: float,
    implementation: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gated output (B, H · V), and the recent convolution inputs and the state after the token."""
    _check(token, learned, recent_BTC, state_BHKV)
    supported, arguments = (state_BHKV, token, learned, recent_BTC), (token, learned, recent_BTC, state_BHKV, eps)
    return run("memory_step", implementation, supported, reference.memory_step, *arguments)


def _check(token: Projected, learned: Learned, recent_BTC: Tensor, state_BHKV: Tensor) -> None:
    op, given = "memory_step", {f"token.{name}": tensor for name, tensor in token._asdict().items()}
    given |= {f"learned.{name}": tensor for name, tensor in learned._asdict().items()}
    sizes = check_sizes(op, state_BHKV=state_BHKV, **given)
    batch, heads, keys, values, taps = (sizes[letter] for letter in "BHKVT")
    channels = heads * (2 * keys + values)
    check_shape(op, "token.mixed_BC", token.mixed_BC, (batch, channels))
    check_shape(op, "token.gate_BG", token.gate_BG, (batch, heads * values))
    check_shape(op, "recent_BTC", recent_BTC, (batch, taps - 1, channels))

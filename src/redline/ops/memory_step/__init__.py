"""One decoding step of a neural memory layer, without its input and output projections, for one token per sequence.

The reference takes about thirty kernel launches, `triton.py` one. The op modifies nothing in place.

B: sequences, H: heads, K: channels of a key, V: channels of a value, C = H · (2K + V), T: taps, G = H · V.
"""

from torch import Tensor

from redline.errors import ModelError
from redline.ops.checks import check_shape
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
    if state_BHKV.ndim != 4:
        raise ModelError(f"memory_step: state_BHKV must have 4 dimensions, not {tuple(state_BHKV.shape)}.")
    batch, heads, keys, values = state_BHKV.shape
    channels, taps = heads * (2 * keys + values), learned.taps_TC.shape[0] if learned.taps_TC.ndim else 0
    expected = {
        "token.mixed_BC": (token.mixed_BC, (batch, channels)),
        "token.decay_BH": (token.decay_BH, (batch, heads)),
        "token.strength_BH": (token.strength_BH, (batch, heads)),
        "token.gate_BG": (token.gate_BG, (batch, heads * values)),
        "learned.taps_TC": (learned.taps_TC, (taps, channels)),
        "learned.decay_bias_H": (learned.decay_bias_H, (heads,)),
        "learned.log_rate_H": (learned.log_rate_H, (heads,)),
        "learned.norm_V": (learned.norm_V, (values,)),
        "recent_BTC": (recent_BTC, (batch, taps - 1, channels)),
    }
    for name, (tensor, shape) in expected.items():
        check_shape("memory_step", name, tensor, shape)
    supported, arguments = (state_BHKV, token, learned, recent_BTC), (token, learned, recent_BTC, state_BHKV, eps)
    return run("memory_step", implementation, supported, reference.memory_step, *arguments)

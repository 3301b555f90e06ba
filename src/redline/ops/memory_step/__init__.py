"""One token through a layer of neural memory: all that lies between its projections, for decoding.

`reference.py` is the specification, `triton.py` takes one launch where that takes some thirty. Nothing is changed in
place.
"""

from torch import Tensor

from redline.errors import ModelError
from redline.ops.dispatch import choose
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
    """What the token reads, gated, (B, H · V); and the recent inputs of the convolution and the state after it."""
    _check(token, learned, recent_BTC, state_BHKV)

    def why_not() -> str:
        from redline.ops.memory_step import triton

        return triton.why_not(token, learned, recent_BTC, state_BHKV)

    arguments = (token, learned, recent_BTC, state_BHKV, eps)
    if choose("memory step", implementation, state_BHKV.device, why_not) == "triton":
        from redline.ops.memory_step import triton

        return triton.memory_step(*arguments)
    return reference.memory_step(*arguments)


def _check(token: Projected, learned: Learned, recent: Tensor, state: Tensor) -> None:
    if state.ndim != 4:
        raise ModelError(f"a memory step takes a state (B, H, K, V), not {tuple(state.shape)}.")
    batch, heads, keys, values = state.shape
    channels, taps = heads * (2 * keys + values), learned.taps_TC.shape[0] if learned.taps_TC.ndim else 0
    wanted = {
        "mixed": (token.mixed_BC, (batch, channels)),
        "decay": (token.decay_BH, (batch, heads)),
        "strength": (token.strength_BH, (batch, heads)),
        "gate": (token.gate_BG, (batch, heads * values)),
        "taps": (learned.taps_TC, (taps, channels)),
        "decay bias": (learned.decay_bias_H, (heads,)),
        "log rate": (learned.log_rate_H, (heads,)),
        "norm": (learned.norm_V, (values,)),
        "recent inputs": (recent, (batch, taps - 1, channels)),
    }
    for name, (tensor, shape) in wanted.items():
        if tensor.shape != shape:
            raise ModelError(f"a memory step takes its {name} as {shape} here, not {tuple(tensor.shape)}.")

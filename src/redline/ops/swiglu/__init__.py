"""SwiGLU's gating, silu(gate) · up; `reference.py` is its specification, `triton.py` is faster."""

from torch import Tensor

from redline.errors import ModelError
from redline.ops.dispatch import choose
from redline.ops.swiglu import reference

__all__ = ["swiglu"]


def swiglu(gate: Tensor, up: Tensor, implementation: str = "auto") -> Tensor:
    """silu(gate) · up. The two may be halves of one tensor (`x.chunk(2, -1)`): they are read where they lie."""
    if gate.shape != up.shape or gate.dtype != up.dtype or gate.device != up.device:
        pair = f"{_described(gate)} and {_described(up)}"
        raise ModelError(f"SwiGLU takes two tensors of the same shape, dtype and device, not {pair}.")
    if not gate.is_floating_point():
        raise ModelError(f"SwiGLU takes floating-point numbers, not {gate.dtype}.")

    def why_not() -> str:
        from redline.ops.swiglu import triton

        return triton.why_not(gate)

    if choose("SwiGLU", implementation, gate.device, why_not) == "triton":
        from redline.ops.swiglu import triton

        return triton.swiglu(gate, up)
    return reference.swiglu(gate, up)


def _described(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} in {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"

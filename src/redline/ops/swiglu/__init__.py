"""SwiGLU's gating, silu(gate) · up; `reference.py` is its specification, `triton.py` is faster."""

from torch import Tensor

from redline.errors import ModelError
from redline.ops.dispatch import choose
from redline.ops.swiglu import reference

__all__ = ["packed_swiglu", "swiglu"]


def swiglu(gate: Tensor, up: Tensor, implementation: str = "auto") -> Tensor:
    """silu(gate) · up. Halves of one tensor are read where they lie, but `packed_swiglu` has the better gradient."""
    if gate.shape != up.shape or gate.dtype != up.dtype or gate.device != up.device:
        pair = f"{_described(gate)} and {_described(up)}"
        raise ModelError(f"SwiGLU takes two tensors of the same shape, dtype and device, not {pair}.")
    if _choose(implementation, gate) == "triton":
        from redline.ops.swiglu import triton

        return triton.swiglu(gate, up)
    return reference.swiglu(gate, up)


def packed_swiglu(gate_up: Tensor, implementation: str = "auto") -> Tensor:
    """The same of one tensor (…, 2 · width), the gate before the up; its gradient is one tensor as well."""
    if gate_up.ndim < 1 or gate_up.shape[-1] % 2:
        raise ModelError(f"SwiGLU of one tensor takes gate and up side by side, not {tuple(gate_up.shape)}.")
    if _choose(implementation, gate_up) == "triton":
        from redline.ops.swiglu import triton

        return triton.packed_swiglu(gate_up)
    return reference.packed_swiglu(gate_up)


def _choose(asked: str, x: Tensor) -> str:
    if not x.is_floating_point():
        raise ModelError(f"SwiGLU takes floating-point numbers, not {x.dtype}.")

    def why_not() -> str:
        from redline.ops.swiglu import triton

        return triton.why_not(x)

    return choose("SwiGLU", asked, x.device, why_not)


def _described(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} in {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"

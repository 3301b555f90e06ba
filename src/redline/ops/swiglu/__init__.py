"""The gated activation of SwiGLU, silu(gate) · up."""

from torch import Tensor

from redline.errors import ModelError
from redline.ops.checks import check_floating, check_same_device, check_same_dtype, check_shape
from redline.ops.dispatch import run
from redline.ops.swiglu import reference


def swiglu(gate: Tensor, up: Tensor, implementation: str = "auto") -> Tensor:
    """Returns silu(gate) · up.

    Gate and up may be halves of one tensor, which are read in place; `packed_swiglu` computes their gradient faster.
    """
    check_shape("swiglu", "up", up, gate.shape)
    check_floating("swiglu", gate=gate)
    check_same_dtype("swiglu", gate=gate, up=up)
    check_same_device("swiglu", gate=gate, up=up)
    return run("swiglu", implementation, (gate,), reference.swiglu, gate, up)


def packed_swiglu(gate_up: Tensor, implementation: str = "auto") -> Tensor:
    """Returns silu(gate) · up. Gate and up are the halves of one tensor (…, 2 · width), as are their gradients."""
    if gate_up.ndim < 1 or gate_up.shape[-1] % 2:
        raise ModelError(f"packed_swiglu: the last dimension of gate_up must be even, not {tuple(gate_up.shape)}.")
    check_floating("packed_swiglu", gate_up=gate_up)
    return run("packed_swiglu", implementation, (gate_up,), reference.packed_swiglu, gate_up)

"""Reference of SwiGLU's gated activation, silu(gate) · up.

Computed in fp32 (fp64 for fp64 input) and rounded once.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    wide = torch.promote_types(gate.dtype, torch.float32)
    return (F.silu(gate.to(wide)) * up.to(wide)).to(gate.dtype)


def packed_swiglu(gate_up: Tensor) -> Tensor:
    """The last dimension of `gate_up` is the gate followed by the up projection."""
    return swiglu(*gate_up.chunk(2, -1))

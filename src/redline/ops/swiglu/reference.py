"""SwiGLU's gating, silu(gate) · up: the specification.

Computed in fp32 (fp64 for fp64 input) and rounded once.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    wide = torch.promote_types(gate.dtype, torch.float32)
    return (F.silu(gate.to(wide)) * up.to(wide)).to(gate.dtype)


def packed_swiglu(gate_up: Tensor) -> Tensor:
    """Of one tensor, whose last dimension is the gate and then the up."""
    return swiglu(*gate_up.chunk(2, -1))

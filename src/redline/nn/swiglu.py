"""The gated MLP of Llama: down(silu(gate) · up), with one matrix product for gate and up."""

from torch import Tensor

from redline.nn.linear import Linear
from redline.nn.switchable import DispatchedModule
from redline.ops.swiglu import packed_swiglu


class SwiGLU(DispatchedModule):
    op = "swiglu"

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_up = Linear(width, 2 * hidden, bias=False)
        self.down = Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(packed_swiglu(self.gate_up(x), self.implementation))

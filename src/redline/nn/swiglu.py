"""The gated MLP of Llama: down(silu(gate) · up), with gate and up in one product."""

from torch import Tensor

from redline.nn.dispatched import Dispatched
from redline.nn.linear import Linear
from redline.ops.swiglu import swiglu


class SwiGLU(Dispatched):
    op = "SwiGLU"

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_up = Linear(width, 2 * hidden, bias=False)
        self.down = Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(swiglu(gate, up, self.implementation))

"""A choosing module whose operator decides, by `ops.dispatch`, what runs on tensors like the module's own weights."""

from torch import Tensor

from redline.nn.choosing import Choosing
from redline.ops.dispatch import choose


class Dispatched(Choosing):
    op: str

    def chosen(self) -> str:
        weight = next(self.parameters())
        return choose(self.op, self.implementation, weight.device, lambda: _why_not(weight))


def _why_not(tensor: Tensor) -> str:
    from redline.ops.kernel import why_not  # imports Triton

    return why_not(tensor)

"""A linear layer that multiplies a few rows, as decoding does, by a kernel made for reading weights once."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from redline.nn.switchable import SwitchableModule
from redline.ops.int8_matmul import weight_only_matmul
from redline.ops.small_matmul import small_matmul
from redline.ops.small_matmul.tiles import ALIGNED_BYTES, LARGEST_ROWS, LARGEST_UNALIGNED_ROWS

# What the kernels take; from there on the library's own products are the better ones.
_MOST_ROWS = 16
_MOST_ROWS_OF_INT8 = 64


class Linear(nn.Linear, SwitchableModule):
    """`nn.Linear` in names and arithmetic, so that what quantizes linear layers finds it.

    `auto` takes the kernel for few rows where `small_matmul/tiles.py` says that it is faster, `triton` wherever it can.
    A weight that torchao has made int8 is read as it is stored, where torchao alone would first make it whole.
    """

    # The numbers of an int8 weight, and its parts.
    _known: tuple[Tensor, tuple[Tensor, Tensor] | None] | None = None

    def forward(self, input: Tensor) -> Tensor:
        if self.implementation != "reference" and self._is_on_its_own(input):
            rows = input.numel() // self.in_features
            product = None
            if 0 < rows <= _MOST_ROWS and type(self.weight) is nn.Parameter and self.weight.dtype == input.dtype:
                product = small_matmul(self._rows(input), self.weight, self.bias, implementation=self.implementation)
            elif 0 < rows <= _MOST_ROWS_OF_INT8 and (parts := self._int8()) is not None:
                product = weight_only_matmul(self._rows(input), *parts, self.bias, implementation=self.implementation)
            if product is not None:
                return product.view(*input.shape[:-1], self.out_features)
        return F.linear(input, self.weight, self.bias)

    def _rows(self, x: Tensor) -> Tensor:
        return x.reshape(-1, self.in_features)

    def _is_on_its_own(self, x: Tensor) -> bool:
        """On a GPU, and neither for a gradient nor in a dtype that somebody else chooses."""
        return x.is_cuda and not torch.is_grad_enabled() and not torch.is_autocast_enabled("cuda")

    def _int8(self) -> tuple[Tensor, Tensor] | None:
        """Looked at once, by `pack` or the first rows: whether zero is zero is asked of the device, and neither a
        recorded step nor a compiler may ask."""
        numbers = None if type(self.weight) is nn.Parameter else getattr(self.weight, "qdata", None)
        if numbers is None:
            return None
        # Not by the weight itself, whose inside torch exchanges when it moves a module.
        if self._known is None or self._known[0] is not numbers:
            if torch.compiler.is_compiling():
                return None
            self._known = numbers, int8_parts(self.weight)
        return self._known[1]

    def pack(self, device: torch.device) -> None:
        self._int8()

    def active_implementation(self) -> str:
        if self.implementation == "reference" or not self.weight.is_cuda:
            return "torch"
        if self._int8() is not None:
            odd = self.in_features % ALIGNED_BYTES
            return f"int8_matmul up to {LARGEST_UNALIGNED_ROWS if odd else _MOST_ROWS_OF_INT8} rows"
        size = self.weight.element_size()
        most = _MOST_ROWS if self.implementation == "triton" else LARGEST_ROWS.get((size, size), 0)
        if type(self.weight) is not nn.Parameter or not most:
            return "torch"
        return f"small_matmul up to {most} row{'s' if most > 1 else ''}"


def int8_parts(weight: Any) -> tuple[Tensor, Tensor] | None:
    """The int8 numbers and the fp32 scale of each output of a weight that torchao quantized; none of any other.

    None either where inputs are quantized too, or where zero is not stored as zero.
    """
    numbers, scale, zero = (getattr(weight, name, None) for name in ("qdata", "scale", "zero_point"))
    if not isinstance(numbers, Tensor) or not isinstance(scale, Tensor) or numbers.dtype != torch.int8:
        return None
    alone = getattr(weight, "act_quant_kwargs", None) is None and getattr(weight, "act_pre_scale", None) is None
    one_each = scale.numel() == len(numbers) and scale.shape[0] == len(numbers)
    if not alone or not one_each or (zero is not None and bool(zero.any())):
        return None
    return numbers, scale.reshape(-1).float()

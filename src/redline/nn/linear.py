"""A linear layer that uses a dedicated kernel for the few rows of decoding."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from redline.nn.switchable import SwitchableModule
from redline.ops.int8_matmul import weight_only_matmul
from redline.ops.small_matmul import small_matmul
from redline.ops.small_matmul.tiles import ALIGNED_BYTES, LARGEST_ROWS, LARGEST_UNALIGNED_ROWS

# The kernels are tried for at most this many rows of x.
_MOST_ROWS = 16
_MOST_ROWS_OF_INT8 = 64


class Linear(nn.Linear, SwitchableModule):
    """A subclass of `nn.Linear`, so that tools that quantize linear layers find it.

    With the implementation `auto`, the kernel for few rows is used if `small_matmul/tiles.py` lists it as faster; with
    `triton`, whenever the kernel supports the input. A weight that torchao has quantized to int8 is read as int8;
    torchao alone would dequantize it first.
    """

    # The int8 data of the weight, and what `int8_parts` returned for that weight.
    _int8_cache: tuple[Tensor, tuple[Tensor, Tensor] | None] | None = None

    def forward(self, input: Tensor) -> Tensor:
        if self.implementation != "reference" and self._kernels_allowed(input):
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

    def _kernels_allowed(self, x: Tensor) -> bool:
        """Returns whether x is on a GPU and neither gradients nor autocast are enabled."""
        return x.is_cuda and not torch.is_grad_enabled() and not torch.is_autocast_enabled("cuda")

    def _int8(self) -> tuple[Tensor, Tensor] | None:
        """Returns the cached result of `int8_parts`, or None if the weight is not int8.

        `int8_parts` synchronizes with the device, which is impossible during CUDA graph capture and tracing, so `pack`
        or the first eager call fills the cache.
        """
        numbers = None if type(self.weight) is nn.Parameter else getattr(self.weight, "qdata", None)
        if numbers is None:
            return None
        # The cache key is the int8 data, because the weight stays the same object when a module moves.
        if self._int8_cache is None or self._int8_cache[0] is not numbers:
            if torch.compiler.is_compiling():
                return None
            self._int8_cache = numbers, int8_parts(self.weight)
        return self._int8_cache[1]

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
    """Returns the int8 data and the fp32 scale per output of a weight that torchao quantized.

    Returns None if the weight is quantized in another way, not symmetrically, or together with the activations.
    """
    numbers, scale, zero = (getattr(weight, name, None) for name in ("qdata", "scale", "zero_point"))
    if not isinstance(numbers, Tensor) or not isinstance(scale, Tensor) or numbers.dtype != torch.int8:
        return None
    alone = getattr(weight, "act_quant_kwargs", None) is None and getattr(weight, "act_pre_scale", None) is None
    one_each = scale.numel() == len(numbers) and scale.shape[0] == len(numbers)
    if not alone or not one_each or (zero is not None and bool(zero.any())):
        return None
    return numbers, scale.reshape(-1).float()

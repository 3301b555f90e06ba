"""A linear layer that multiplies a few rows, as decoding does, by a kernel made for reading weights once."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from redline.nn.choosing import Choosing
from redline.ops.small_matmul import small_matmul

# What the kernel takes; from there on the library's own products are the better ones.
_MOST_ROWS = 16


class Linear(nn.Linear, Choosing):
    """`nn.Linear` in names and arithmetic, so that what quantizes linear layers finds it.

    `auto` takes the kernel for few rows where `small_matmul/tiles.py` says that it is faster, `triton` wherever it can.
    """

    def forward(self, input: Tensor) -> Tensor:
        if self.implementation != "reference" and self._is_small(input):
            rows = input.reshape(-1, self.in_features)
            product = small_matmul(rows, self.weight, self.bias, implementation=self.implementation)
            return product.view(*input.shape[:-1], self.out_features)
        return F.linear(input, self.weight, self.bias)

    def _is_small(self, x: Tensor) -> bool:
        # A quantized weight is a tensor class of its own, which knows how to multiply itself.
        plain = type(self.weight) is nn.Parameter and self.weight.dtype == x.dtype
        few = 0 < x.numel() <= _MOST_ROWS * self.in_features
        return x.is_cuda and plain and few and not torch.is_grad_enabled() and not torch.is_autocast_enabled("cuda")

    def chosen(self) -> str:
        row = torch.empty((1, self.in_features), dtype=self.weight.dtype, device=self.weight.device)
        with torch.no_grad():
            small = self.implementation != "reference" and self._is_small(row)
        return f"small_matmul up to {_MOST_ROWS} rows" if small else "torch"

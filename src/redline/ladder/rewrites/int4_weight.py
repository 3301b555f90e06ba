"""A weight of 4-bit integers, as a tensor that `F.linear` multiplies with the int4 kernels of torch.

Each group of consecutive values in a row has a scale and an offset in bf16: value = (integer - 8) * scale + offset. The
kernels multiply in bf16, whatever the dtype of the input, because those for other dtypes are many times slower or, on a
GPU, absent. Import this module only where it is needed: torchao takes a second.
"""

from typing import Any

import torch
from torch import Tensor
from torchao.utils import TorchAOBaseTensor

_LARGEST = 15
_MIDDLE = 8


class Int4Weight(TorchAOBaseTensor):
    """The weight of a linear layer; `packed` has the layout of the device on which it was made."""

    tensor_data_names = ["packed", "scales"]  # noqa: RUF012
    tensor_attribute_names = ["group", "like"]  # noqa: RUF012

    def __new__(cls, packed: Tensor, scales: Tensor, group: int, like: torch.dtype) -> "Int4Weight":
        shape = (scales.shape[1], scales.shape[0] * group)
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=like, device=packed.device, requires_grad=False)

    def __init__(self, packed: Tensor, scales: Tensor, group: int, like: torch.dtype) -> None:
        self.packed, self.scales, self.group, self.like = packed, scales, group, like

    @classmethod
    @torch.no_grad()
    def of(cls, weight: Tensor, group: int) -> "Int4Weight":
        """Quantizes a weight of [outputs, inputs]; the smallest and largest value of a group become 0 and 15."""
        rows, columns = weight.shape
        values = weight.float().view(rows, columns // group, group)
        low, high = values.amin(-1), values.amax(-1)
        # Rounds scale and offset to bf16 before the integers are computed from them, so that the integers compensate
        # for this rounding.
        scale = ((high - low) / _LARGEST).clamp_min(torch.finfo(torch.float32).tiny).bfloat16()
        offset = (low + scale.float() * _MIDDLE).bfloat16()
        steps = (values - offset.float().unsqueeze(-1)) / scale.float().unsqueeze(-1)
        integers = (steps.round() + _MIDDLE).clamp(0, _LARGEST).to(torch.int32).view(rows, columns)
        scales = torch.stack([scale.t(), offset.t()], -1).contiguous()
        return cls(_pack(integers), scales, group, weight.dtype)

    def times(self, x: Tensor, bias: Tensor | None) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).to(self.scales.dtype)
        multiply = torch.ops.aten._weight_int4pack_mm if x.is_cuda else torch.ops.aten._weight_int4pack_mm_for_cpu
        product = multiply(rows.contiguous(), self.packed, self.group, self.scales)
        product = product.view(*x.shape[:-1], self.shape[0]).to(x.dtype)
        return product if bias is None else product + bias

    def dequantize(self) -> Tensor:
        """Returns the values that the kernel multiplies with, in bf16."""
        identity = torch.eye(self.shape[1], dtype=self.scales.dtype, device=self.device)
        return self.times(identity, None).t()

    def __repr__(self) -> str:
        return f"Int4Weight({tuple(self.shape)}, group={self.group}, dtype={self.like}, device={self.device})"

    def _stable_hash_for_caching(self) -> str:
        """Returns the properties on which compiled code depends.

        torch caches compiled code only for tensor subclasses that have this method.
        """
        return f"int4 {tuple(self.shape)} {self.group} {self.like}"


def _pack(integers: Tensor) -> Tensor:
    if not integers.is_cuda:
        return torch.ops.aten._convert_weight_to_int4pack_for_cpu(integers, 1)
    pairs = (integers[:, ::2] << 4 | integers[:, 1::2]).to(torch.uint8)
    # Uses the largest number of tiles (of 16 columns) that the kernel can read at once and that fits the width.
    tiles = next(tiles for tiles in (8, 4, 2) if integers.shape[1] % (16 * tiles) == 0)
    return torch.ops.aten._convert_weight_to_int4pack(pairs.contiguous(), tiles)


@Int4Weight.implements(torch.ops.aten.linear.default)
@Int4Weight.implements_torch_function(torch.nn.functional.linear)
def _linear(_func: Any, _types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    x, weight, bias = (*args, kwargs.get("bias"))[:3] if len(args) < 3 else args[:3]
    return weight.times(x, bias)

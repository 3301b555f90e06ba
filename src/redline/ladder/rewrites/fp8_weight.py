"""A tensor subclass for weights in fp8, which `F.linear` multiplies on fp8 tensor cores (`torch._scaled_mm`).

The input of each product is quantized at run time with plain torch operations. A compiler can therefore fuse the
quantization with the operation that computes the input, such as a LayerNorm or an activation, and the input is never
stored in 16 bits. Import this module only where it is needed, because importing torchao takes a second.
"""

from typing import Any

import torch
from torch import Tensor
from torchao.utils import TorchAOBaseTensor

FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(FP8).max
# The smallest scale. Without it, rows of zeros would have the scale 0 and be divided by it.
_LEAST_SCALE = 1e-12


class Fp8Weight(TorchAOBaseTensor):
    """The weight of a linear layer, of shape [outputs, inputs].

    `codes` holds the values in fp8, `scales` one scale for the whole weight or one for each output, and `like` the
    dtype of the original weight.
    """

    tensor_data_names = ["codes", "scales"]  # noqa: RUF012
    tensor_attribute_names = ["like"]  # noqa: RUF012

    def __new__(cls, codes: Tensor, scales: Tensor, like: torch.dtype) -> "Fp8Weight":
        return torch.Tensor._make_wrapper_subclass(
            cls, codes.shape, dtype=like, device=codes.device, requires_grad=False
        )

    def __init__(self, codes: Tensor, scales: Tensor, like: torch.dtype) -> None:
        self.codes, self.scales, self.like = codes, scales, like

    @classmethod
    @torch.no_grad()
    def of(cls, weight: Tensor, per_row: bool) -> "Fp8Weight":
        values, scales = quantized(weight, per_row)
        return cls(values, scales.t().contiguous() if per_row else scales, weight.dtype)

    def times(self, x: Tensor, bias: Tensor | None) -> Tensor:
        per_row = self.scales.ndim == 2
        rows = x.reshape(-1, x.shape[-1])
        values, scales = quantized(rows, per_row)
        # With a scale per row the product is bf16; with one scale it has the input's dtype.
        out = torch.bfloat16 if per_row else x.dtype
        # `_scaled_mm` adds a 16-bit bias of the product's dtype. Any other bias needs another pass over the output.
        added = bias if bias is not None and bias.dtype == out and out != torch.float32 else None
        product = torch._scaled_mm(
            values, self.codes.t(), scales, self.scales, bias=added, out_dtype=out, use_fast_accum=True
        )
        product = product.view(*x.shape[:-1], self.shape[0]).to(x.dtype)
        return product if bias is None or added is not None else product + bias

    def dequantize(self) -> Tensor:
        """Returns the values that the product uses, in fp32."""
        return self.codes.float() * (self.scales.t() if self.scales.ndim == 2 else self.scales)

    def __repr__(self) -> str:
        return f"Fp8Weight({tuple(self.shape)}, scales={self.scales.numel()}, dtype={self.like}, device={self.device})"

    def _stable_hash_for_caching(self) -> str:
        """Returns the properties on which compiled code depends.

        torch caches compiled code only for tensor subclasses that have this method.
        """
        return f"fp8 {tuple(self.shape)} {tuple(self.scales.shape)} {self.like}"


def quantized(rows: Tensor, per_row: bool) -> tuple[Tensor, Tensor]:
    """Returns the values in fp8 and their scales in fp32: a column with one scale per row, or one scale for all."""
    largest = rows.abs().amax(-1, keepdim=True) if per_row else rows.abs().amax()
    scales = (largest.float() / _LARGEST).clamp_min(_LEAST_SCALE)
    # Clamps because the division may round to more than the largest fp8 value, which the conversion would make NaN.
    return (rows.float() / scales).clamp(-_LARGEST, _LARGEST).to(FP8), scales


@Fp8Weight.implements(torch.ops.aten.linear.default)
@Fp8Weight.implements_torch_function(torch.nn.functional.linear)
def _linear(_func: Any, _types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    x, weight, bias = (*args, kwargs.get("bias"))[:3] if len(args) < 3 else args[:3]
    return weight.times(x, bias)

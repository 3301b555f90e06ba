"""Matrix multiplication of int8 activations and weights with torch._int_mm, which is fast for many rows.

M: rows, K: features, N: outputs.
"""

from functools import cache

import torch
from torch import Tensor


def int8_matmul(
    x_MK: Tensor, w_NK: Tensor, x_scale: Tensor, w_scale_N: Tensor, bias_N: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """Computes the same as the reference. Scales and bias are applied in fp32 to exact int32 sums."""
    out = torch._int_mm(x_MK, w_NK.t()).float() * x_scale.reshape(-1, 1) * w_scale_N
    return (out if bias_N is None else out + bias_N.float()).to(out_dtype)


def why_not(x_MK: Tensor, w_NK: Tensor) -> str:
    """Returns why torch._int_mm does not support these shapes on their device, or an empty string."""
    # Skips this check while a compiler traces, because compilers cannot trace it. Eager calls run the check.
    if not x_MK.is_cuda and not torch.compiler.is_compiling() and not products_are_exact(x_MK.device):
        return "it saturates at 16 bits on this CPU, which has no int8 dot product instructions"
    (rows, depth), columns = x_MK.shape, w_NK.shape[0]
    if x_MK.is_cuda and rows <= 16:
        return f"it needs more than 16 rows, not {rows}"
    if x_MK.is_cuda and (depth % 8 or columns % 8 or not depth or not columns):
        return f"features and outputs must be multiples of 8, not {depth} and {columns}"
    return ""


@cache
def products_are_exact(device: torch.device) -> bool:
    """Returns whether torch._int_mm is exact. On some CPUs, sums of large values saturate at 16 bits."""
    if device.type != "cpu":
        return True
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(0, 2, (64, 64), generator=generator).mul(255).sub(128).to(torch.int8) for _ in range(2))
    return torch.equal(torch._int_mm(a, b).long(), a.long() @ b.long())

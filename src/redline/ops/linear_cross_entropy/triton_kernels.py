"""Triton kernels that scale the gradients of linear cross-entropy."""

import triton
import triton.language as tl


@triton.jit
def scale_kernel(source, factor, out, count, BLOCK: tl.constexpr):
    """Computes out = source · factor, where the factor is one element on the device."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    value = tl.load(source + index, mask=inside).to(tl.float32) * tl.load(factor)
    tl.store(out + index, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def scale_in_place_kernel(values, factor, count, BLOCK: tl.constexpr):
    """Multiplies the values by the factor in place. A factor of 1 reads and writes nothing."""
    scale = tl.load(factor)
    if scale != 1.0:
        index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = index < count
        value = tl.load(values + index, mask=inside).to(tl.float32) * scale
        tl.store(values + index, value.to(values.dtype.element_ty), mask=inside)

"""What every Triton kernel's host side needs: whether it can run here, how wide the device is, and a launch on it."""

import sys
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

Argument = Tensor | TensorDescriptor | float | None
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
INTERPRETED: bool = knobs.runtime.interpret

_COMPUTE_CAPABILITY = 8
# From Hopper on, a unit of its own copies blocks of memory that a descriptor describes.
_DESCRIPTORS_FROM = 9
_INTERPRETED_PROCESSORS = 2


def why_not(tensor: Tensor, dtypes: tuple[torch.dtype, ...] = DTYPES) -> str:
    """Why no kernel can take this tensor, or nothing."""
    if not (tensor.is_cuda or INTERPRETED):
        return f"it needs a CUDA device, and the input is on {tensor.device.type}"
    if tensor.dtype not in dtypes:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        return f"it takes {names}, not {str(tensor.dtype).removeprefix('torch.')}"
    if INTERPRETED and tensor.dtype == torch.bfloat16:
        return "Triton's interpreter cannot compute in bf16"
    if not tensor.numel():
        return "the input is empty"
    # A compiler that traces this call has asked the same already, and cannot ask here.
    if tensor.is_cuda and not torch.compiler.is_compiling():
        major, minor = torch.cuda.get_device_capability(tensor.device)
        if major < _COMPUTE_CAPABILITY:
            return f"it needs compute capability {_COMPUTE_CAPABILITY}.0, and this device has {major}.{minor}"
    return ""


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Argument, **constants: object) -> None:
    """Runs the kernel on the device of its first argument: Triton itself takes the current one."""
    tensor = arguments[0]
    assert isinstance(tensor, Tensor)
    with torch.cuda.device_of(tensor):
        kernel[grid](*arguments, **constants)


def dot_precision(dtype: torch.dtype) -> str:
    """How products are taken: three of halves of fp32's numbers have its accuracy on tensor cores."""
    return "tf32x3" if dtype == torch.float32 else "ieee"


def processors(tensor: Tensor) -> int:
    """How many programs the device of this tensor runs side by side at the least."""
    if not tensor.is_cuda:
        return _INTERPRETED_PROCESSORS
    return torch.cuda.get_device_properties(tensor.device).multi_processor_count


def has_descriptors(tensor: Tensor) -> bool:
    """Whether the device of this tensor reads and writes blocks by descriptors in hardware."""
    return not tensor.is_cuda or torch.cuda.get_device_capability(tensor.device)[0] >= _DESCRIPTORS_FROM


def shared_bytes(tensor: Tensor) -> int:
    """How much shared memory a program may have on the device of this tensor."""
    if not tensor.is_cuda:
        return sys.maxsize
    return torch.cuda.get_device_properties(tensor.device).shared_memory_per_block_optin


def pieces(size: int) -> tuple[int, int]:
    """The power of two and the smaller one that a block of this many numbers is taken in; 0 where one is enough."""
    first = padded(size) // 2
    rest = padded(size - first) if size > first else first
    return (2 * first, 0) if rest >= first else (first, rest)


def padded(size: int, least: int = 16) -> int:
    """The power of two that a block of this many numbers takes."""
    return max(least, 1 << (size - 1).bit_length())

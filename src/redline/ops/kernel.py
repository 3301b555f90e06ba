"""Host-side functions that all Triton kernels use: custom ops, device support and limits, block sizes, and launches."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

T = TypeVar("T")
Argument = Tensor | TensorDescriptor | float | None
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
INTERPRETED: bool = knobs.runtime.interpret

_COMPUTE_CAPABILITY = 8
# The major compute capability from which GPUs have a tensor memory accelerator, which copies blocks by descriptor.
_DESCRIPTORS_FROM = 9
_INTERPRETED_PROCESSORS = 2


def why_not(tensor: Tensor, dtypes: tuple[torch.dtype, ...] = DTYPES) -> str:
    """Returns why the kernels do not support this tensor, or an empty string if they do."""
    if not (tensor.is_cuda or INTERPRETED):
        return f"a CUDA device is required, and the input is on {tensor.device.type}"
    if tensor.dtype not in dtypes:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        return f"unsupported dtype {str(tensor.dtype).removeprefix('torch.')} (supported: {names})"
    if INTERPRETED and tensor.dtype == torch.bfloat16:
        return "Triton's interpreter does not support bfloat16"
    if not tensor.numel():
        return "the input is empty"
    # Skips this check while a compiler traces, because the compute capability cannot be queried then. Eager calls run
    # the check.
    if tensor.is_cuda and not torch.compiler.is_compiling():
        major, minor = torch.cuda.get_device_capability(tensor.device)
        if major < _COMPUTE_CAPABILITY:
            return f"compute capability {_COMPUTE_CAPABILITY}.0 is required, and this device has {major}.{minor}"
    return ""


def custom_op(name: str, fake: Callable[..., Any], mutates: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Registers a function as the custom op `redline::name`.

    Compilers call `fake` with the same arguments; it returns uninitialized outputs. `mutates` names the arguments that
    the op writes.
    """

    def register(function: Callable[..., Any]) -> Any:
        op = torch.library.custom_op(f"redline::{name}", function, mutates_args=mutates)
        op.register_fake(fake)
        return op

    return register


def differentiate(
    op: Any,
    gradient: Callable[..., Sequence[Tensor | None]],
    saved: Callable[[Sequence[Any], Any], Sequence[Any]] | None = None,
    materialize: bool = True,
) -> None:
    """Registers `gradient(ctx, *grads)` as the backward pass of an op. It may omit gradients at the end that are None.

    `ctx.saved_tensors` are `saved(inputs, outputs)`, by default all inputs that are tensors or None. The other inputs
    are in `ctx.options`. Without `materialize`, the gradient of an unused output is None instead of zeros.
    """

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        tensors = [one for one in inputs if one is None or isinstance(one, Tensor)]
        ctx.options = [one for one in inputs if not (one is None or isinstance(one, Tensor))]
        ctx.save_for_backward(*(tensors if saved is None else saved(inputs, output)))
        ctx.set_materialize_grads(materialize)

    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        found = gradient(ctx, *grads)
        return *found, *[None] * (len(ctx.needs_input_grad) - len(found))

    op.register_autograd(backward, setup_context=keep)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Argument, **constants: object) -> None:
    """Launches the kernel on the device of its first argument. Triton alone would use the current device."""
    tensor = arguments[0]
    assert isinstance(tensor, Tensor)
    with torch.cuda.device_of(tensor):
        kernel[grid](*arguments, **constants)


def empty_like(x: Tensor) -> Tensor:
    """Returns an uninitialized contiguous tensor with the shape, dtype and device of x, whatever the strides of x."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def rows_contiguous(x: Tensor) -> Tensor:
    """Returns x, copied only if its last dimension is not contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def dot_precision(dtype: torch.dtype) -> str:
    """Returns the `input_precision` for tl.dot: three TF32 products on tensor cores have the accuracy of fp32."""
    return "tf32x3" if dtype == torch.float32 else "ieee"


def processors(tensor: Tensor) -> int:
    """Returns the number of multiprocessors of the tensor's device."""
    if not tensor.is_cuda:
        return _INTERPRETED_PROCESSORS
    return torch.cuda.get_device_properties(tensor.device).multi_processor_count


def has_descriptors(tensor: Tensor) -> bool:
    """Returns whether the tensor's device reads and writes blocks by descriptors in hardware."""
    return not tensor.is_cuda or torch.cuda.get_device_capability(tensor.device)[0] >= _DESCRIPTORS_FROM


def shared_bytes(tensor: Tensor) -> int:
    """Returns how much shared memory one program may use on the tensor's device."""
    if not tensor.is_cuda:
        return sys.maxsize
    return torch.cuda.get_device_properties(tensor.device).shared_memory_per_block_optin  # pyrefly: ignore[missing-attribute]


def pieces(size: int) -> tuple[int, int]:
    """Returns the sizes of two power-of-two blocks that together cover a dimension of this size.

    If a single block is no larger than the two together, returns the size of the single block, and 0.
    """
    first = padded(size) // 2
    rest = padded(size - first) if size > first else first
    return (2 * first, 0) if rest >= first else (first, rest)


def tiles_up_to(choices: Mapping[int, T], size: int) -> T:
    """Returns the choice with the smallest key that is at least `size`."""
    return choices[min(key for key in choices if key >= size)]


def padded(size: int, least: int = 16) -> int:
    """Returns the power of two that a block of this size is padded to, at least `least`."""
    return max(least, 1 << (size - 1).bit_length())

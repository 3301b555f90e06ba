"""What tests of window attention share: comparison with the reference in fp64, in memory that was not clean before."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils._device import _device_constructors

from redline.ops.window_attention import reference

# What a sum of many rounded numbers may be off, in units of the dtype's last digit, as seen over the whole tensor.
ROUNDINGS = {torch.float64: 64, torch.float32: 16, torch.float16: 2, torch.bfloat16: 2}
# Tensor cores make fp32 products of three parts, and round their sums down.
ROUNDINGS_ON_TENSOR_CORES = {**ROUNDINGS, torch.float32: 128}


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel forgets to write shows."""

    def poisoned(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*args: object, **kwargs: object) -> Tensor:
            tensor = allocate(*args, **kwargs)
            return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

        return call

    # torch keeps a list of what makes tensors, for torch.device contexts: it must not be made of poisoned ones.
    _device_constructors()
    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))


@pytest.fixture
def agrees() -> Callable[..., None]:
    """Compares an implementation's output and gradients with the reference in fp64, for fresh inputs.

    Queries, keys and biases are large enough for attention to be uneven, so that every bias and every mask counts.
    """

    def check(
        implementation: Callable[[Tensor, Tensor, int, int], Tensor],
        shape_BHWC: tuple[int, int, int, int],
        heads: int,
        window: int,
        shift: int,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        *picture, channels = shape_BHWC
        rows = (2 * window - 1) ** 2
        qkv, table = torch.randn(*picture, 3 * channels) * 1.5, torch.randn(rows, heads) * 2
        inputs = [tensor.to(device, dtype).requires_grad_() for tensor in (qkv, table)]
        gradient = torch.randn(*shape_BHWC).to(device, dtype)
        exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
        expected_out = reference.window_attention(exact[0], exact[1], window, shift)
        out = implementation(inputs[0], inputs[1], window, shift)
        assert out.shape == tuple(shape_BHWC) and out.dtype == dtype
        expected = (expected_out, *torch.autograd.grad(expected_out, exact, gradient.double()))
        found = (out, *torch.autograd.grad(out, inputs, gradient))
        for name, one, other in zip(("output", "qkv gradient", "table gradient"), expected, found, strict=True):
            error = ((other.double() - one).norm() / one.norm()).item()
            roundings = ROUNDINGS_ON_TENSOR_CORES if device == "cuda" else ROUNDINGS
            limit = roundings[dtype] * torch.finfo(dtype).eps
            assert error <= limit, f"{name} is off by {error:.2e}, and {limit:.2e} would be rounding"

    return check

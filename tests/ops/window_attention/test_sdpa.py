"""Tests window attention with torch's fused attention, and the tensors that are cached between calls."""

from collections.abc import Callable

import pytest
import torch
from torch._subclasses import FakeTensorMode

from redline.ops.window_attention import reference, sdpa

Agrees = Callable[..., None]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("shift", [0, 1, 2])
@pytest.mark.parametrize("picture", [(1, 4, 4), (3, 8, 4), (1, 4, 12), (2, 12, 8)])
def test_agrees_with_the_reference(agrees: Agrees, picture: tuple[int, ...], shift: int, dtype: torch.dtype) -> None:
    agrees(sdpa.window_attention, (*picture, 21), 3, 4, shift, dtype)


@pytest.mark.parametrize(("channels", "heads"), [(180, 6), (212, 4), (244, 2), (276, 6), (308, 4)])
def test_agrees_at_the_widths_of_drct(agrees: Agrees, channels: int, heads: int) -> None:
    agrees(sdpa.window_attention, (1, 16, 8, channels), heads, 8, 4)
    agrees(sdpa.window_attention, (1, 8, 8, channels), heads, 8, 0)


def test_agrees_at_windows_of_sixteen(agrees: Agrees) -> None:
    agrees(sdpa.window_attention, (1, 32, 16, 60), 2, 16, 8)


def test_without_gradients_the_fused_kernel_agrees_too() -> None:
    qkv, table = torch.randn(2, 16, 24, 36), torch.randn(225, 2)
    for shift in (0, 4):
        expected = reference.window_attention(qkv.double(), table.double(), 8, shift)
        with torch.inference_mode():
            torch.testing.assert_close(
                sdpa.window_attention(qkv, table, 8, shift).double(), expected, atol=5e-6, rtol=0
            )


@pytest.mark.parametrize("attend", [reference.window_attention, sdpa.window_attention])
def test_half_precision_is_close(attend: Callable[..., torch.Tensor]) -> None:
    qkv, table = torch.randn(1, 8, 8, 36).bfloat16(), torch.randn(49, 2).bfloat16()
    expected = reference.window_attention(qkv.double(), table.double(), 4, 2)
    # Scores are rounded here too, and the exponential amplifies the error.
    assert (attend(qkv, table, 4, 2).double() - expected).norm() <= 4 * torch.finfo(
        torch.bfloat16
    ).eps * expected.norm()


@pytest.mark.parametrize("attend", [reference.window_attention, sdpa.window_attention])
def test_constants_created_in_inference_mode_work_in_training(attend: Callable[..., torch.Tensor]) -> None:
    qkv, table = torch.randn(1, 12, 12, 9), torch.randn(121, 1)  # a window size that no other test uses
    with torch.inference_mode():
        attend(qkv, table, 6, 3)
    out = attend(qkv, table.requires_grad_(), 6, 3)
    (gradient,) = torch.autograd.grad(out.square().sum(), table)
    assert gradient.norm() > 0


@pytest.mark.parametrize("attend", [reference.window_attention, sdpa.window_attention])
def test_constants_are_not_shared_with_a_tracer(attend: Callable[..., torch.Tensor]) -> None:
    for _ in range(2):
        with FakeTensorMode():
            assert attend(torch.randn(1, 10, 10, 9), torch.randn(81, 1), 5, 2).shape == (1, 10, 10, 3)
        out = attend(torch.randn(1, 10, 10, 9), torch.randn(81, 1), 5, 2)
        assert type(out) is torch.Tensor and out.isfinite().all()


def test_constants_are_cached() -> None:
    device = torch.device("cpu")
    assert reference.relative_index(3, device) is reference.relative_index(3, device)
    one = reference.shift_mask(6, 6, 3, 1, device, torch.float32)
    assert reference.shift_mask(6, 6, 3, 1, device, torch.float32) is one
    assert reference.shift_mask(6, 6, 3, 2, device, torch.float32) is not one


@pytest.mark.parametrize("attend", [reference.window_attention, sdpa.window_attention])
def test_compiles_without_graph_breaks(attend: Callable[..., torch.Tensor]) -> None:
    qkv, table = torch.randn(1, 8, 4, 18, requires_grad=True), torch.randn(49, 2, requires_grad=True)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for one, other in zip(
        torch.autograd.grad(compiled(qkv, table, 4, 2).square().sum(), (qkv, table)),
        torch.autograd.grad(attend(qkv, table, 4, 2).square().sum(), (qkv, table)),
        strict=True,
    ):
        torch.testing.assert_close(one, other)

"""Tests the Triton kernels of rope, on a GPU or interpreted on a CPU."""

from collections.abc import Callable

import pytest
import torch

from redline.errors import MachineError
from redline.ops.rope import reference, rope, rope_tables

triton = pytest.importorskip("redline.ops.rope.triton")
DEVICE = "cpu" if triton.kernel.INTERPRETED else "cuda"
Agrees = Callable[..., None]

pytestmark = pytest.mark.skipif(
    not triton.kernel.INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA device or TRITON_INTERPRET=1"
)


@pytest.mark.parametrize(
    ("positioned", "dtype"), [(False, torch.float32), (True, torch.float32), (True, torch.float16)]
)
@pytest.mark.parametrize("sizes", [(2, 5, 3, 1, 6), (1, 3, 12, 4, 64), (2, 2, 5, 5, 80), (1, 2, 70, 2, 128)])
def test_agrees(agrees: Agrees, sizes: tuple[int, ...], positioned: bool, dtype: torch.dtype) -> None:
    batch, tokens, q_heads, k_heads, channels = sizes
    cos, sin = rope_tables(40, channels, 500.0, device=DEVICE)
    positions = torch.randint(40, (batch, tokens), device=DEVICE) if positioned else None
    inputs = torch.randn(batch, tokens, q_heads, channels), torch.randn(batch, tokens, k_heads, channels)
    agrees(
        lambda q, k: triton.rope(q, k, cos, sin, positions),
        lambda q, k: reference.rope(q, k, cos, sin, positions),
        inputs,
        dtype,
        DEVICE,
    )


def test_takes_slices_and_any_strides() -> None:
    cos, sin = rope_tables(4, 10, device=DEVICE)
    packed = torch.randn(3, 4, 7, 10, device=DEVICE)
    by_head = torch.randn(3, 2, 4, 10, device=DEVICE).transpose(1, 2)
    scattered = torch.randn(3, 4, 10, 2, device=DEVICE).transpose(2, 3)
    for q, k in ((packed[:, :, :5], packed[:, :, 5:]), (by_head, scattered)):
        torch.testing.assert_close(triton.rope(q, k, cos, sin), reference.rope(q, k, cos, sin))


def test_agrees_with_only_one_gradient() -> None:
    cos, sin = rope_tables(4, 10, device=DEVICE)
    q, k = (torch.randn(1, 4, heads, 10, device=DEVICE, requires_grad=True) for heads in (3, 2))
    for index, one in ((0, q), (1, k)):
        (found,) = torch.autograd.grad(triton.rope(q, k, cos, sin)[index].square().sum(), one)
        torch.testing.assert_close(found, 2 * one)  # rotated by forward and backward


def test_a_position_outside_the_tables_gives_nan() -> None:
    cos, sin = rope_tables(4, 10, device=DEVICE)
    q = torch.randn(1, 3, 2, 10, device=DEVICE)
    out, _ = triton.rope(q, q, cos, sin, torch.tensor([[3, 4, -1]], device=DEVICE))
    assert out[0, 0].isfinite().all() and out[0, 1:].isnan().all()


def test_passes_opcheck() -> None:
    q, k = (torch.randn(2, 3, heads, 8, device=DEVICE, requires_grad=True) for heads in (4, 2))
    cos, sin = rope_tables(9, 8, device=DEVICE)
    torch.library.opcheck(triton.rope, (q, k, cos, sin, torch.randint(9, (2, 3), device=DEVICE), False))


def test_compiles_without_graph_breaks(compiled_agrees: Callable[..., None]) -> None:
    cos, sin = rope_tables(9, 8, device=DEVICE)

    def block(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k = (x + 1).unflatten(-1, (6, 8)).split((4, 2), 2)
        return rope(q, k, cos, sin, implementation="triton")

    compiled_agrees(block, [torch.randn(2, 5, 48, device=DEVICE, requires_grad=True)])


@pytest.mark.parametrize(
    ("q", "sentence"),
    [
        (torch.zeros(1, 1, 1, 4, dtype=torch.float64), "unsupported dtype float64 .*float32."),
        (torch.zeros(0, 1, 1, 4), "the input is empty"),
        (torch.zeros(1, 1, 1, 1026), "heads may have at most 1024 channels, not 1026"),
    ],
)
def test_unsupported_inputs_are_refused(q: torch.Tensor, sentence: str) -> None:
    q = q.to(DEVICE)
    with pytest.raises(MachineError, match=f"{sentence}.$"):
        rope(q, q, *rope_tables(1, q.shape[-1], device=DEVICE), implementation="triton")

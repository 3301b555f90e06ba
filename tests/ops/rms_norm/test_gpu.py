"""Tests RMSNorm on a GPU: full size, every dtype, CUDA graphs and compilation."""

from collections.abc import Callable

import pytest
import torch

from redline.ops.rms_norm import add_rms_norm, reference, rms_norm

pytestmark = pytest.mark.gpu
Agrees = Callable[..., None]
EPS = 1e-5
SHAPES = [(2000, 4096), (4000, 768), (801, 2048), (1001, 8192), (101, 16384), (40, 65536), (10_003, 64), (7, 130)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_agrees(agrees: Agrees, shape: tuple[int, int], dtype: torch.dtype) -> None:
    inputs = torch.randn(shape, device="cuda"), torch.randn(shape[-1])
    agrees(lambda *given: rms_norm(*given, EPS), lambda *exact: reference.rms_norm(*exact, EPS), inputs, dtype, "cuda")


@pytest.mark.parametrize("shape", [(16384, 4096), (65536, 768)])
def test_agrees_at_full_size(agrees: Agrees, shape: tuple[int, int]) -> None:
    test_agrees(agrees, shape, torch.bfloat16)


@pytest.mark.parametrize("shape", [(4096, 4096), (8000, 768), (33, 101)])
def test_agrees_with_a_residual(agrees: Agrees, shape: tuple[int, int]) -> None:
    inputs = *torch.randn(2, *shape, device="cuda"), torch.randn(shape[-1])

    def exact(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # The bf16 sum is normalized, as it is stored.
        total = x + residual
        total = total + (total.bfloat16().double() - total).detach()
        return reference.rms_norm(total, weight, EPS), total

    agrees(lambda *given: add_rms_norm(*given, EPS), exact, inputs, torch.bfloat16, "cuda")


def test_offsets_beyond_32_bits() -> None:
    x = torch.randn(600_000, 4096, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(4096, device="cuda", dtype=torch.bfloat16)
    found = rms_norm(x, weight, EPS)
    last = reference.rms_norm(x[-5:], weight, EPS)
    assert (found[-5:].float() - last.float()).norm() <= 0.01 * last.float().norm()


def test_is_deterministic(repeats: Callable[..., None]) -> None:
    shapes = (4000, 768), (4000, 768), (768,)
    inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    repeats(lambda *given: add_rms_norm(*given, EPS), inputs)
    repeats(lambda x, weight: rms_norm(x, weight, EPS), [inputs[0], inputs[2]])


def test_inductor_compiles_training_without_graph_breaks(compiled_agrees: Callable[..., None]) -> None:
    shapes = (640, 768), (640, 768), (768,)
    inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for shape in shapes]

    def block(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        normed, total = add_rms_norm(x * 2, residual, weight, EPS)
        return rms_norm(normed, weight, EPS).sin(), total

    compiled_agrees(block, inputs)


def test_a_fallback_warns() -> None:
    with pytest.warns(
        UserWarning, match="rms_norm: falling back to plain PyTorch, which is slower: unsupported dtype float64"
    ):
        rms_norm(torch.randn(3, 4, device="cuda").double(), torch.ones(4, device="cuda"))

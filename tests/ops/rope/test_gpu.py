"""Tests rope on a GPU: full size, every dtype, CUDA graphs and compilation."""

from collections.abc import Callable

import pytest
import torch

from redline.ops.rope import reference, rope, rope_tables

pytestmark = pytest.mark.gpu
Agrees = Callable[..., None]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("positioned", [False, True])
@pytest.mark.parametrize("sizes", [(1, 2048, 32, 8, 128), (2, 2048, 12, 12, 64), (3, 77, 9, 3, 80), (1, 1, 96, 1, 128)])
def test_agrees(agrees: Agrees, sizes: tuple[int, ...], positioned: bool, dtype: torch.dtype) -> None:
    batch, tokens, q_heads, k_heads, channels = sizes
    cos, sin = rope_tables(4096, channels, 500_000.0, device="cuda")
    positions = torch.randint(4096, (batch, tokens), device="cuda") if positioned else None
    inputs = torch.randn(batch, tokens, q_heads, channels), torch.randn(batch, tokens, k_heads, channels)
    agrees(
        lambda q, k: rope(q, k, cos, sin, positions),
        lambda q, k: reference.rope(q, k, cos, sin, positions),
        inputs,
        dtype,
        "cuda",
    )


def test_tables_are_the_same_as_on_a_cpu() -> None:
    for one, other in zip(rope_tables(70_000, 64, device="cuda"), rope_tables(70_000, 64), strict=True):
        torch.testing.assert_close(one.cpu(), other, atol=1e-7, rtol=0)


def test_is_deterministic(repeats: Callable[..., None]) -> None:
    cos, sin = rope_tables(300, 64, device="cuda")
    positions = torch.randint(300, (2, 200), device="cuda")
    shapes = (2, 200, 12, 64), (2, 200, 4, 64)
    inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    repeats(lambda q, k: rope(q, k, cos, sin, positions), inputs)


def test_inductor_compiles_training_without_graph_breaks(compiled_agrees: Callable[..., None]) -> None:
    cos, sin = rope_tables(300, 64, device="cuda")

    def block(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k = (x * 2).unflatten(-1, (6, 64)).split((4, 2), 2)
        return rope(q, k, cos, sin)

    compiled_agrees(block, [torch.randn(2, 300, 384, device="cuda", dtype=torch.bfloat16, requires_grad=True)])

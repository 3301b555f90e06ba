"""Tests convolved heads on a GPU: full size, every dtype, CUDA graphs and compilation."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from redline.ops.convolved_heads import convolved_heads, reference

pytestmark = pytest.mark.gpu
Agrees = Callable[..., None]


def inputs(batch: int, tokens: int, taps: int, heads: int, key_dim: int, value_dim: int) -> list[Tensor]:
    channels = heads * (2 * key_dim + value_dim)
    shapes = (batch, tokens, channels), (taps, channels), (batch, taps - 1, channels)
    return [torch.randn(shape, device="cuda") for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("sizes", [(4, 2048, 4, 12, 64, 64), (3, 777, 4, 6, 96, 128), (1, 1, 2, 3, 5, 7)])
def test_agrees(agrees: Agrees, sizes: tuple[int, ...], packed: bool, dtype: torch.dtype) -> None:
    (batch, tokens, _, heads, key_dim, _), documents = sizes, None
    if packed:
        documents = (torch.rand(batch, tokens, device="cuda") < 0.01).int().cumsum(1)
    agrees(
        lambda *given: convolved_heads(*given, heads, key_dim, documents),
        lambda *given: reference.convolved_heads(*given, heads, key_dim, documents),
        inputs(*sizes),
        dtype,
        "cuda",
    )


def test_is_deterministic(repeats: Callable[..., None]) -> None:
    given = [t.bfloat16().requires_grad_() for t in inputs(2, 1000, 4, 12, 64, 64)]
    repeats(lambda *given: convolved_heads(*given, 12, 64), given)


def test_inductor_compiles_training_without_graph_breaks(compiled_agrees: Callable[..., None]) -> None:
    def block(x: Tensor, taps: Tensor, recent: Tensor) -> tuple[Tensor, ...]:
        return convolved_heads(x * 2, taps, recent, 4, 32)

    compiled_agrees(block, [t.bfloat16().requires_grad_() for t in inputs(2, 300, 4, 4, 32, 32)])

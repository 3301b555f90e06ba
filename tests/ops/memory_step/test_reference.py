"""Tests the reference against a step by hand, and against the layer that processes many tokens at once."""

import pytest
import torch

from redline.models.memory.config import TitanConfig
from redline.models.memory.neural_memory import NeuralMemory
from redline.models.memory.token_positions import TokenPositions
from redline.ops.memory_step import memory_step

from .by_hand import EPS, Sizes, assert_near, by_hand, example

pytestmark = pytest.mark.cpu

SIZES: list[Sizes] = [(2, 3, 8, 8, 4), (1, 1, 5, 7, 1), (3, 2, 17, 3, 2)]


@pytest.mark.parametrize("sizes", SIZES)
def test_agrees_with_a_step_by_hand(sizes: Sizes) -> None:
    given = example(sizes, torch.float64)
    before = [tensor.clone() for tensor in (given[2], given[3])]
    for found, expected in zip(memory_step(*given, EPS), by_hand(given)[:3], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert torch.equal(given[2], before[0]) and torch.equal(given[3], before[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", SIZES)
def test_the_state_is_fp32_in_half_precision(sizes: Sizes, dtype: torch.dtype) -> None:
    given = example(sizes, dtype)
    found = memory_step(*given, EPS)
    assert [one.dtype for one in found] == [dtype, dtype, torch.float32]
    assert_near(found, given, of_read=8 * torch.finfo(dtype).eps, of_state=8 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("heads", [1, 3])
def test_agrees_with_the_layer_token_by_token(heads: int) -> None:
    config = TitanConfig(
        16, 24, 1, 1, memory_heads=heads, memory_key_dim=5, memory_value_dim=7, attention_every=0, memory_chunk=4
    )
    layer, x_BSD = NeuralMemory(config).double(), torch.randn(2, 11, 24, dtype=torch.float64)
    with torch.no_grad():
        for weight in layer.parameters():
            weight.normal_()
    whole, after, _ = layer(x_BSD, TokenPositions.whole(x_BSD[..., 0], None, config))
    state = None
    with torch.no_grad():
        for token in range(11):
            one, state, _ = layer(
                x_BSD[:, token : token + 1], TokenPositions.whole(x_BSD[:, :1, 0], None, config), state
            )
            torch.testing.assert_close(one, whole[:, token : token + 1], rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(state.memory, after.memory, rtol=1e-9, atol=1e-11)
    # A BLAS may sum the products of one token in another order than those of eleven.
    torch.testing.assert_close(state.recent_BTC, after.recent_BTC, rtol=1e-9, atol=1e-11)


def test_nan_propagates() -> None:
    token, learned, recent, state = example((1, 2, 4, 4, 3), torch.float32)
    token.mixed_BC[0, 0] = torch.nan
    gated, *_ = memory_step(token, learned, recent, state, EPS)
    assert gated[0, :4].isnan().all() and gated[0, 4:].isfinite().all()

"""Rotary positions anywhere in a text, and the short convolution before them."""

import pytest
import torch

from redline.models.memory.neural_memory import new_taps, next_inputs, short_convolution
from redline.models.memory.token_positions import Rotation


def test_unrotate_reverses_rotate() -> None:
    x = torch.randn(2, 3, 2, 8)
    rotation = Rotation.at(torch.tensor([[0, 5, 10**6], [1, 2, 3]]), 8, 10_000.0)
    turned, also = rotation.rotate(x, x)
    torch.testing.assert_close(turned, also)
    torch.testing.assert_close(rotation.unrotate(turned), x, atol=1e-5, rtol=0)
    torch.testing.assert_close(turned[0, 0], x[0, 0])


def test_each_pair_of_channels_turns_by_its_own_frequency() -> None:
    rotation = Rotation.at(torch.tensor([[2]]), 4, 100.0)
    assert rotation.cos_RD[0].tolist() == pytest.approx([-0.4161468, 0.9800666])
    assert rotation.sin_RD[0].tolist() == pytest.approx([0.9092974, 0.1986693])


def test_the_taps_begin_within_their_bound() -> None:
    taps = new_taps(4, 1000)
    assert taps.shape == (4, 1000) and 0.49 < taps.abs().max() <= 0.5 and taps.min() < -0.49


@pytest.mark.parametrize("length", [1, 2, 3, 7])
def test_inputs_for_the_next_tokens_are_kept(length: int) -> None:
    everything = torch.randn(2, 3 + length, 4)
    recent, x = everything[:, :3], everything[:, 3:]
    assert torch.equal(next_inputs(x, recent), everything[:, -3:])
    whole, held = short_convolution(x, torch.randn(4, 4), recent)
    assert whole.shape == x.shape and torch.equal(held, everything[:, -3:])


def test_inputs_of_an_earlier_document_are_not_held() -> None:
    x, recent = torch.ones(1, 4, 2), torch.ones(1, 3, 2)
    documents = torch.tensor([[1, 1, 2, 2]])
    assert next_inputs(x, recent, documents)[0, :, 0].tolist() == [0.0, 1.0, 1.0]
    same = torch.tensor([[1, 1, 1, 1]])
    assert next_inputs(x[:, :1], recent, same[:, :1])[0, :, 0].tolist() == [1.0, 1.0, 1.0]

"""Tests which arguments of the memory step are refused."""

import pytest
import torch

from redline.errors import ModelError
from redline.ops.memory_step import memory_step

from .by_hand import EPS, example


def test_invalid_arguments_are_refused() -> None:
    token, learned, recent, state = example((2, 3, 4, 5, 3), torch.float32)
    for given, words in (
        ((token, learned, recent, state[0]), "state_BHKV must have 4 dimensions"),
        (
            (token._replace(mixed_BC=token.mixed_BC[:, 1:]), learned, recent, state),
            r"token.mixed_BC must have shape \(2, 39\)",
        ),
        (
            (token._replace(decay_BH=token.decay_BH[:1]), learned, recent, state),
            r"token.decay_BH must have shape \(2, 3\)",
        ),
        (
            (token._replace(gate_BG=token.gate_BG[:, 1:]), learned, recent, state),
            r"token.gate_BG must have shape \(2, 15\)",
        ),
        ((token, learned._replace(norm_V=learned.norm_V[1:]), recent, state), r"learned.norm_V must have shape \(5,\)"),
        ((token, learned, recent[:, 1:], state), r"recent_BTC must have shape \(2, 2, 39\)"),
    ):
        with pytest.raises(ModelError, match=words):
            memory_step(*given, EPS)

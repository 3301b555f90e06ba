"""Arguments of the memory step that are refused."""

import pytest
import torch

from redline.errors import ModelError
from redline.ops.memory_step import memory_step

from .by_hand import EPS, example


def test_what_does_not_fit_is_refused() -> None:
    token, learned, recent, state = example((2, 3, 4, 5, 3), torch.float32)
    for given, words in (
        ((token, learned, recent, state[0]), r"a state \(B, H, K, V\)"),
        ((token._replace(mixed_BC=token.mixed_BC[:, 1:]), learned, recent, state), r"its mixed as \(2, 39\)"),
        ((token._replace(decay_BH=token.decay_BH[:1]), learned, recent, state), r"its decay as \(2, 3\)"),
        ((token._replace(gate_BG=token.gate_BG[:, 1:]), learned, recent, state), r"its gate as \(2, 15\)"),
        ((token, learned._replace(norm_V=learned.norm_V[1:]), recent, state), r"its norm as \(5,\)"),
        ((token, learned, recent[:, 1:], state), r"its recent inputs as \(2, 2, 39\)"),
    ):
        with pytest.raises(ModelError, match=words):
            memory_step(*given, EPS)

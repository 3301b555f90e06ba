"""A memory model as something to train: its size, its arithmetic, and when its score costs something."""

from dataclasses import replace
from typing import Any

import pytest

from redline.errors import RedlineError
from redline.training.settings import decode
from redline.training.text.architecture import products_per_token
from redline.training.text.architectures import MemorySettings

TINY = MemorySettings(width=16, layers=4, heads=2, attention_every=2, segment=8, memory_chunk=4)
SLOTS = replace(TINY, memory_slots=4)


@pytest.mark.parametrize("change", [{}, {"attention_every": 0}, {"attention_every": 1}, {"layers": 5}], ids=str)
def test_weights_are_counted_without_being_made(change: dict[str, Any]) -> None:
    settings = replace(TINY, **change)
    assert settings.parameters(30) == sum(weight.numel() for weight in settings.build(30).parameters())


@pytest.mark.parametrize(
    "change", [{"merge_cosine": -1.0}, {"merge_cosine": 1.0}, {"score_weight": 0.0, "score_after": 0}], ids=str
)
def test_settings_at_their_limits_are_valid(change: dict[str, Any]) -> None:
    assert decode(MemorySettings, {"memory_slots": 4, **change}, "model")


@pytest.mark.parametrize(
    "change", [{"merge_cosine": -1.1}, {"merge_cosine": 1.1}, {"score_weight": -0.1}, {"score_after": -1}], ids=str
)
def test_settings_beyond_their_limits_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(RedlineError, match=next(iter(change))):
        decode(MemorySettings, {"memory_slots": 4, **change}, "model")


def test_the_score_penalty_starts_at_its_step() -> None:
    settings = replace(SLOTS, score_after=3, score_weight=0.5)
    model = settings.build(30)
    for step, weight in ((0, 0.0), (2, 0.0), (3, 0.5), (4, 0.5)):
        settings.before_step(model, step)
        assert model.score_weight == weight
        assert settings.penalties(step) == (("score penalty",) if weight else ())
    assert TINY.penalties(1000) == () and replace(settings, score_weight=0.0).penalties(1000) == ()


def test_flops_of_attention_and_neural_memory() -> None:
    """Two layers attend, two remember by 2 heads of 8 × 8; forward and backward are six operations a product."""
    matrix = 2 * (3 * 8 * 8 + 4 * (8 + 8))
    for settings, length, seen in ((TINY, 20, 10), (TINY, 400, 16), (SLOTS, 400, 200)):
        model = settings.build(30)
        beside = settings.flops_per_token(model, length) / 6 - products_per_token(model)
        assert beside == 2 * 2 * seen * 16 + 2 * matrix
    assert TINY.kept_per_token == 4 * (4 * 16 + 2 * 64)

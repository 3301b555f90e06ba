"""The limits of settings, and changes that apply completely or not at all."""

from typing import Any

import pytest

from redline.errors import RedlineError
from redline.stream.settings import LiveSettings, Settings


@pytest.mark.parametrize(
    "values",
    [
        {"strength": 0},
        {"strength": 1},
        {"steps": 1},
        {"steps": 1000.0},
        {"seed": 0},
        {"seed": 2**63 - 1},
        {"prompt": "a" * 2000},
        {"control": (0, -1.5)},
    ],
    ids=lambda values: next(iter(values)),
)
def test_values_at_their_limits_are_taken_in_their_own_kind(values: dict[str, Any]) -> None:
    ((name, value),) = values.items()
    taken = getattr(Settings(**values), name)
    assert taken == value and type(taken) is type(getattr(Settings(), name))


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"strength": -0.01}, "strength must be a number from 0 to 1"),
        ({"strength": 1.01}, "strength must be a number from 0 to 1"),
        ({"strength": float("nan")}, "strength must be a number from 0 to 1"),
        ({"steps": 0}, "steps must be a whole number from 1 to 1000"),
        ({"steps": 1001}, "steps must be a whole number from 1 to 1000"),
        ({"steps": 1.5}, "steps must be a whole number from 1 to 1000"),
        ({"seed": -1}, "seed must be a whole number"),
        ({"seed": 2**63}, "seed must be a whole number"),
        ({"seed": 0.5}, "seed must be a whole number"),
        ({"control": (float("inf"),)}, "finite numbers"),
        ({"prompt": "a" * 2001}, "at most 2,000 characters"),
        ({"prompt": 5}, "at most 2,000 characters"),
        ({"colour": 1}, "unknown setting 'colour'"),
        ({"strength": "much"}, "invalid settings"),
    ],
)
def test_an_invalid_change_changes_nothing(values: dict[str, Any], sentence: str) -> None:
    live = LiveSettings(Settings(strength=0.25))
    with pytest.raises(RedlineError, match=sentence):
        live.change(**{"steps": 2, **values})
    assert live.now() == Settings(strength=0.25)


def test_a_change_that_the_model_refuses_changes_nothing() -> None:
    def check(settings: Settings) -> None:
        if settings.steps > 1:
            raise RedlineError("one step")

    live = LiveSettings(check=check)
    with pytest.raises(RedlineError, match="one step"):
        live.change(steps=2, strength=1.0)
    assert live.change(strength=1.0) == live.now() == Settings(strength=1.0)

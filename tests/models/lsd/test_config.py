"""The sizes of an LSD: what follows from its settings, and which settings are refused."""

from dataclasses import replace
from typing import Any

import pytest

from redline.errors import ModelError
from redline.models.lsd import LsdConfig

TINY = LsdConfig()


@pytest.mark.parametrize(
    "change",
    [
        {"patch": 1},
        {"patch": 8},
        {"width": 8},
        {"multipliers": (1, 1), "attending": 0},
        {"attending": 4},
        {"control": 0},
        {"blocks": 1},
    ],
    ids=str,
)
def test_settings_at_their_limits_are_taken(change: dict[str, Any]) -> None:
    assert LsdConfig.from_dict(replace(TINY, **change).to_dict()) == replace(TINY, **change)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"patch": 3}, "patch = 3 must be one of 1, 2, 4, 8"),
        ({"width": 0}, "width = 0 must be a whole number .at least 8 and a multiple of 8.[.]$"),
        ({"width": 12}, "width = 12 must be a whole number .at least 8 and a multiple of 8.[.]$"),
        ({"multipliers": (1,)}, r"multipliers = \(1,\) must be a list of at least 2 items"),
        ({"multipliers": (1, 0)}, r"must be a list of at least 2 items, each a whole number \(at least 1\)"),
        ({"blocks": 0}, "blocks = 0 must be a whole number .at least 1."),
        ({"attending": 5}, "attending = 5 must be at most 4, one per multiplier"),
        ({"attending": -1}, "attending = -1 must be a whole number .at least 0."),
        ({"control": -8}, "control = -8 must be a whole number .at least 0 and a multiple of 8."),
        ({"control": 4}, "control = 4 must be a whole number .at least 0 and a multiple of 8."),
    ],
)
def test_settings_beyond_their_limits_are_refused(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        replace(TINY, **change)


@pytest.mark.parametrize("value", [2.0, "2", True, [2], None])
def test_a_value_of_another_kind_is_refused(value: object) -> None:
    with pytest.raises(ModelError, match="patch = .* in the header of 'a.json' must be one of 1, 2, 4, 8"):
        LsdConfig.from_dict({**TINY.to_dict(), "patch": value}, "a.json")
    with pytest.raises(ModelError, match="multipliers = .* must be a list"):
        LsdConfig.from_dict({**TINY.to_dict(), "multipliers": [1, value] if value != [2] else 2}, "a.json")
    with pytest.raises(ModelError, match="'width' is missing"):
        LsdConfig.from_dict({"patch": 2})


@pytest.mark.parametrize(("patch", "channels_in", "channels_out"), [(1, 16, 8), (2, 40, 24), (4, 144, 96)])
def test_channels_are_padded_to_multiples_of_eight(patch: int, channels_in: int, channels_out: int) -> None:
    config = replace(TINY, patch=patch)
    assert (config.channels_in, config.channels_out) == (channels_in, channels_out)


def test_a_side_is_padded_to_a_multiple_and_to_two_of_them() -> None:
    assert TINY.multiple_px == 16 and TINY.widths == (16, 32, 64, 128)
    assert [TINY.padding_px(side) for side in (1, 16, 31, 32, 33, 48)] == [31, 16, 1, 0, 15, 0]
    assert str(TINY) == "LSD tiny" and str(replace(TINY, width=24)) == "LSD of width 24"

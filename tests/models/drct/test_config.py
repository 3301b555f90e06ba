"""The sizes of a DRCT: the paper's rules, and which settings are refused."""

from dataclasses import replace
from typing import Any

import pytest

from redline.errors import ModelError
from redline.models.drct import DrctConfig


def test_the_defaults_follow_the_papers_rule() -> None:
    assert DrctConfig.of() == DrctConfig() and DrctConfig.of(groups=12) == DrctConfig(groups=12)
    assert DrctConfig().block_widths == (180, 212, 244, 276, 308)
    # Where 6 − width % 6 does not divide the width, the most heads up to 6 that do.
    assert DrctConfig.of(width=25, growth=1).heads == (5, 2, 3, 2, 1)
    assert DrctConfig.of(width=8, growth=4).mlp_widths == (16, 24, 32, 20, 24)


@pytest.mark.parametrize(("scale", "steps"), [(2, (2,)), (3, (3,)), (4, (2, 2)), (8, (2, 2, 2))])
def test_it_enlarges_in_steps(scale: int, steps: tuple[int, ...]) -> None:
    assert DrctConfig(scale=scale).upsampling == steps


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"scale": 5}, "scale = 5 must be one of 2, 3, 4, 8"),
        ({"heads": (6, 4, 2, 6)}, "must have 5 entries"),
        ({"mlp_widths": (360, 424, 488, 276)}, "must have 5 entries"),
        ({"heads": (7, 4, 2, 6, 4)}, "width 180 cannot have 7 heads"),
        ({"heads": (6, 4, 2, 6, 0)}, "width 308 cannot have 0 heads"),
    ],
)
def test_what_cannot_be_is_refused(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        replace(DrctConfig(), **change)


def test_names() -> None:
    assert str(DrctConfig()) == "DRCT ×4" and str(DrctConfig(groups=12, scale=2)) == "DRCT-L ×2"
    assert str(DrctConfig.of(groups=1)) == "DRCT of 1 group ×4"
    assert str(DrctConfig.of(groups=2, width=24, growth=8)) == "DRCT of 2 groups ×4, width 24"

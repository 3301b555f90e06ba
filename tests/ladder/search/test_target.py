"""A target is reached by the whole interval in every shape, or by the peak."""

from dataclasses import replace

import pytest

from redline.errors import RedlineError
from redline.ladder.measurement import Measurement
from redline.ladder.search.target import Target

ROW = Measurement(
    "w",
    "eager",
    "final",
    "kept",
    "",
    {},
    samples={"batch=1": (0.010, 0.011, 0.012), "batch=8": (0.030, 0.031, 0.032)},
    peak_bytes=3 * 2**20,
)


@pytest.mark.parametrize(
    ("text", "reached", "words"),
    [
        ("40ms", True, "40 ms was reached: a step takes 30 ms – 32 ms with batch=8"),
        ("31ms", False, "31 ms was not reached: a step takes 30 ms – 32 ms with batch=8"),
        ("15ms", False, "15 ms was not reached"),
        ("4MiB", True, "4 MiB was reached: the peak is 3 MiB"),
        ("2MiB", False, "2 MiB was not reached: the peak is 3 MiB"),
    ],
)
def test_reached_or_not(text: str, reached: bool, words: str) -> None:
    target = Target.parse(text)
    assert target.reached(ROW) is reached and target.sentence(ROW).startswith(words)
    assert not target.reached(replace(ROW, samples={}))


def test_unknown_target_is_refused() -> None:
    with pytest.raises(RedlineError, match="unknown target"):
        Target.parse("soon")

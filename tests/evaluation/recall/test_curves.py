"""Curves over lengths that double."""

import re

import pytest

from goldens import check_golden
from redline.evaluation.recall.curves import Axis, LengthCurve, draw, short_count


def test_curves_stand_where_they_stood() -> None:
    lengths = (512, 1024, 2048, 3000, 4096)
    share = LengthCurve("share", tuple((length, 1 - index / 10) for index, length in enumerate(lengths)))
    bytes_ = LengthCurve("memory", tuple((length, 3.0 * length) for length in lengths))
    flat = LengthCurve("flat", ((512, 0.0), (4096, 0.0)))
    drawn = [
        draw("Recall", [share, LengthCurve("none", ())], "recall", "tokens", Axis("right", (0.0, 1.0))),
        draw("Memory", [bytes_], "memory", "tokens", Axis("bytes", doubling=True, write=lambda v: f"{v:.0f} B")),
        draw("All", [share, bytes_, flat, share], "all", "tokens", Axis("any")),
        draw("Flat", [flat], "flat", "tokens", Axis("none")),
    ]
    text = "".join(re.sub(r"(?<=>)(?=<(?!/))", "\n", str(drawing)) + "\n" for drawing in drawn)
    check_golden("recall_curves.svg.txt", text)
    assert draw("One", [LengthCurve("one", ((512, 1.0),))], "one", "tokens", Axis("any")) == ""


@pytest.mark.parametrize(
    ("count", "said"), [(2**20, "1M"), (3 * 2**20, "3M"), (2**10, "1K"), (1536, "1,536"), (5120, "5K"), (1000, "1,000")]
)
def test_counts_are_shortened_where_that_is_exact(count: int, said: str) -> None:
    assert short_count(count) == said

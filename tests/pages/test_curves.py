"""Curves show what the journal holds, thinned out, and nothing that cannot be drawn."""

import re

import pytest

from redline.pages.curves import Curve, draw_curves, short_count


def test_many_points_are_thinned_and_the_last_is_kept() -> None:
    points = Curve("loss", tuple((n, float(n)) for n in range(5001))).thinned
    assert 500 < len(points) <= 600 and points[-1] == (5000, 5000.0)


def test_curves_are_drawn_once_per_width() -> None:
    falling = Curve("training", tuple((n, 3.0 - n / 10) for n in range(20)))
    drawn = str(draw_curves("Loss", [falling, Curve("none", ())], "loss"))
    assert drawn.count("<svg") == 3 and "training ends at 1.1" in drawn
    first = re.search(r'<path class="c0" d="M([^"]+)"', drawn)
    heights = [float(pair.split()[1]) for pair in first[1].split("L")]
    assert heights == sorted(heights)  # lower values stand lower on the page
    assert str(draw_curves("Loss", [Curve("one", ((1, 2.0),))], "loss")) == ""


@pytest.mark.parametrize(
    ("count", "said"), [(2**20, "1M"), (3 * 2**20, "3M"), (2**10, "1K"), (1536, "1,536"), (5120, "5K"), (1000, "1,000")]
)
def test_counts_are_shortened_where_that_is_exact(count: int, said: str) -> None:
    assert short_count(count) == said

"""Whole reports against golden files: where every mark stands, and what every table says."""

import re
from functools import partial

import pytest
from markupsafe import Markup

from goldens import check_golden
from ladder.report.synthetic_climb import cpu_climb, h200_climb, training_climb
from redline.ladder.report import Climb, render_markdown
from redline.ladder.report.charts import draw_all
from redline.ladder.report.html import _tiles
from redline.pages.curves import Curve, draw_curves

# Each with another one of the widths, so that every width is drawn once.
CASES = {
    "h200": (h200_climb(), 0),
    "cpu": (cpu_climb(), 1),
    "training": (training_climb(), 2),
    "shapes": (h200_climb(shapes=("size=64", "size=96"))[:9], 1),
}


def lines(drawing: str) -> str:
    """One element in a line, so that a difference can be read."""
    return re.sub(r"(?<=>)(?=<(?!/))", "\n", drawing) + "\n"


@pytest.mark.parametrize("case", CASES)
def test_charts_match_the_golden_files(case: str) -> None:
    measurements, width = CASES[case]
    charts = draw_all(Climb.of(measurements))
    drawings = [re.findall(r"<svg.*?</svg>", chart, re.DOTALL)[width] for chart in charts.values()]
    check_golden(f"report_{case}.svg.txt", "".join(map(lines, drawings)))


@pytest.mark.parametrize("case", CASES)
def test_tables_match_the_golden_files(case: str) -> None:
    climb = Climb.of(CASES[case][0])
    tiles = [f"{tile.name}: {tile.value} ({tile.note})\n" for tile in _tiles(climb)]
    check_golden(f"report_{case}.md", render_markdown(climb) + "\n" + "".join(tiles))


def test_curves_match_the_golden_file() -> None:
    falling = Curve("training", tuple((n, 3.0 - n / 10) for n in range(20)))
    flat = Curve("flat", ((0, 2.0), (19, 2.0)), "other")
    drawn = draw_curves("Loss", [falling, flat], "loss")
    drawn += draw_curves("Share", [flat], "share", along="frame", span=(0.0, 4.0), write=lambda value: f"{value:.0%}")
    drawn += draw_curves("Open", [falling], "open", span=(0.5, None)) + draw_curves("Flat", [flat], "flat")
    drawn += draw_curves("Below", [flat], "below", span=(5.0, None))
    check_golden("curves.svg.txt", lines(str(drawn)))


def test_curves_over_lengths_match_the_golden_file() -> None:
    lengths = (512, 1024, 2048, 3000, 4096)
    share = Curve("share", tuple((length, 1 - index / 10) for index, length in enumerate(lengths)))
    bytes_ = Curve("memory", tuple((length, 3.0 * length) for length in lengths))
    flat = Curve("flat", ((512, 0.0), (4096, 0.0)), "c2")
    draw = partial(draw_curves, along="tokens", lengths=True)
    drawn = [
        draw("Recall", [share, Curve("none", ())], "recall", up="right", span=(0.0, 1.0)),
        draw("Memory", [bytes_], "memory", up="bytes", doubling=True, write=lambda v: f"{v:.0f} B"),
        draw("All", [share, bytes_, flat, share], "all", up="any"),
        draw("Flat", [flat], "flat", up="none"),
    ]
    check_golden("recall_curves.svg.txt", lines(str(Markup("").join(drawn))))
    assert draw("One", [Curve("one", ((512, 1.0),))], "one") == ""

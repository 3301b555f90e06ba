"""The pictures: marks stand where the figures say, ticks are round, and text keeps to its room."""

import re

import pytest

from ladder.report.synthetic_climb import cpu_climb, h200_climb, training_climb
from redline.ladder.gate import Score
from redline.ladder.report.charts import FULL, HALF, draw_all
from redline.ladder.report.charts.ladder import draw_ladder
from redline.ladder.report.charts.quality import _score_scale
from redline.ladder.report.climb import Climb
from redline.pages.svg import Drawing, Scale, format_tick, shorten


def test_every_width_of_every_chart_is_drawn():
    charts = draw_all(Climb.of(h200_climb()))
    assert list(charts) == ["ladder", "front", "quality", "roofline", "distributions", "ablation"]
    for name, widths in (("ladder", FULL), ("quality", HALF)):
        assert re.findall(r'<svg class="w(\d+)"', charts[name]) == [str(w) for w in widths]


@pytest.mark.parametrize("climb", [h200_climb(), cpu_climb(), training_climb()])
def test_marks_stay_inside_the_drawing(climb):
    for chart in draw_all(Climb.of(climb)).values():
        for drawing in re.findall(r"<svg.*?</svg>", chart, re.DOTALL):
            width, height = map(float, re.search(r'viewBox="0 0 (\d+) (\d+)"', drawing).groups())
            for name, limit in (("x", width), ("cx", width), ("y", height), ("cy", height)):
                values = [float(v) for v in re.findall(rf' {name}="([^"]+)"', drawing)]
                assert all(-1 <= value <= limit + 1 for value in values)
            for x, w in re.findall(r'<rect class="[^"]*" x="([^"]+)" y="[^"]+" width="([^"]+)"', drawing):
                assert float(x) + float(w) <= width + 1


def test_bars_are_as_long_as_the_times():
    climb = Climb.of(cpu_climb())
    drawing = draw_ladder(climb, 920)
    widths = {
        kind: float(w)
        for kind, w in re.findall(r'class="m-(base|final)" x="[^"]+" y="[^"]+" width="([^"]+)"', drawing.svg("l"))
    }
    assert widths["base"] / widths["final"] == pytest.approx(
        climb.baseline.row.time_s / climb.final.row.time_s, rel=0.01
    )


@pytest.mark.parametrize(
    ("low", "high", "log"),
    [(0, 14.2, False), (0.97, 1.04, False), (1e-7, 0.5, True), (80, 210, True), (3e10, 9e14, True)],
)
def test_ticks_are_few_and_inside(low, high, log):
    ticks = Scale(low, high, 0, 100, log).ticks(6)
    assert 2 <= len(ticks) <= 10
    assert all(low * 0.999 <= tick <= high * 1.001 for tick in ticks)
    assert ticks == sorted(set(ticks))


def test_scale_ends_where_told():
    assert Scale(2, 4, 10, 20)(3) == 15
    assert Scale(1, 100, 0, 10, log=True)(10) == pytest.approx(5)
    assert Scale(1, 100, 0, 10, log=True)(0) == 0


def test_text_is_escaped_and_shortened():
    drawing = Drawing(100, 50, "<t>", "&")
    drawing.label(0, 0, "<b>a long name that does not fit</b>", 60)
    svg = str(drawing.svg("n"))
    assert "<b>" not in svg and "&lt;b&gt;" in svg and "&lt;t&gt;" in svg and "…" in svg
    assert shorten("abc", 1000) == "abc"
    assert format_tick(1e-5) == "10⁻⁵" and format_tick(0.01) == "0.01"


def test_scores_and_gate_are_inside_the_axis():
    higher = Score("cosine", 0.9999, 0.999, "higher", True)
    scale = _score_scale([0.9999, 0.5], higher, 100, 0)
    assert (scale.low, scale.high) == pytest.approx((0.5 - 0.12 * 0.4999, 0.9999 + 0.12 * 0.4999)) and not scale.log
    flat = _score_scale([0.999], higher, 100, 0)
    assert (flat.low, flat.high) == pytest.approx((0.999 * 0.95, 0.999 * 1.05))
    lower = Score("max_error", 0.0, 0.02, "lower", True)
    floor = _score_scale([0.0, 0.5], lower, 100, 0)
    assert (floor.low, floor.high) == pytest.approx((0.02 / 2.5, 0.5 * 2.5)) and floor.log
    tiny = _score_scale([1e-12], lower, 100, 0)
    assert tiny.low == pytest.approx(0.02 * 1e-6 / 2.5)

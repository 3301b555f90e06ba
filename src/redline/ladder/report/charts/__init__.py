"""The charts of the report: one file each, drawn as SVG for a width in pixels.

Each chart is drawn once per width instead of being scaled, so that its text is readable on a phone; the style sheet
shows the drawing that fits.
"""

from collections.abc import Callable

from markupsafe import Markup

from redline.ladder.report.charts.ablation import draw_ablation
from redline.ladder.report.charts.distributions import draw_distributions
from redline.ladder.report.charts.front import draw_front
from redline.ladder.report.charts.ladder import draw_ladder
from redline.ladder.report.charts.quality import draw_quality
from redline.ladder.report.charts.rooflines import draw_roofline
from redline.ladder.report.climb import Climb
from redline.pages.svg import Drawing

Draw = Callable[[Climb, int], Drawing | None]
FULL, HALF = (340, 560, 920), (340, 440, 640)


def draw_all(climb: Climb) -> dict[str, Markup]:
    """Returns all charts that the climb has data for, by name."""
    charts: tuple[tuple[str, Draw, tuple[int, ...]], ...] = (
        ("ladder", draw_ladder, FULL),
        ("front", draw_front, FULL),
        ("quality", draw_quality, HALF),
        ("roofline", draw_roofline, HALF),
        ("distributions", draw_distributions, FULL),
        ("ablation", draw_ablation, FULL),
    )
    found = {}
    for name, draw, widths in charts:
        drawings = [drawing for width in widths if (drawing := draw(climb, width)) is not None]
        if drawings:
            found[name] = Markup("\n").join(drawing.svg(name) for drawing in drawings)
    return found

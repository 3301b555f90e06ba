"""One page about a model's steadiness: what was found, and the figures frame by frame."""

import math
from collections.abc import Mapping, Sequence
from importlib.resources import files

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from redline.evaluation.drift.case_run import CaseRun
from redline.evaluation.drift.findings import Finding
from redline.ladder.report.charts.curves import Curve, draw_curves
from redline.version import VERSION

# Title, a line on what it shows, and the figures in it (the second in another colour).
_CHARTS = (
    ("Gain over the input", "PSNR against the clean picture, in dB above the input's.", ("gain_db",)),
    ("Flicker", "Warp error of the output, and of the input in the other colour.", ("flicker", "input_flicker")),
    ("Brightness", "Logarithm of the ratio of the green means: 0 is right, a slope is drift.", ("green",)),
    ("Detail", "Logarithm of the ratio of what is left beside a blur.", ("detail",)),
    ("Structure", "Distance of the output's structure to the input's.", ("distance",)),
)


def render_page(
    name: str,
    about: str,
    watched: Sequence[CaseRun],
    findings: Sequence[Finding],
    controls: Mapping[str, Sequence[Finding]],
) -> str:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(files("redline.evaluation.drift").joinpath("page.html.jinja").read_text("utf-8"))
    return template.render(
        version=VERSION,
        css=Markup(files("redline.ladder.report").joinpath("report.css").read_text("utf-8")),
        name=name,
        meta=about,
        headline=headline(findings),
        holds=all(finding.holds for finding in findings),
        findings=findings,
        cases=[(one.case, len(one.rows), _charts(one)) for one in watched],
        controls=[(control, [f for f in fallen if not f.holds]) for control, fallen in controls.items()],
    )


def headline(findings: Sequence[Finding]) -> str:
    fallen = [finding for finding in findings if not finding.holds]
    if not fallen:
        cases = list(dict.fromkeys(finding.case for finding in findings))
        return f"It is steady: all {len(findings)} findings hold ({', '.join(cases)})."
    said = "; ".join(f"{finding.case}: {finding.sentence}" for finding in fallen[:3])
    more = f", and {len(fallen) - 3} more" if len(fallen) > 3 else ""
    return f"{len(fallen)} of {len(findings)} findings do not hold: {said}{more}."


def _charts(watched: CaseRun) -> list[tuple[str, str, Markup]]:
    charts = []
    for title, note, names in _CHARTS:
        curves = []
        for name, kind in zip(names, ("curve", "second"), strict=False):
            points = tuple((i, v) for i, v in enumerate(watched.series(name)) if math.isfinite(v))
            curves.append(Curve(name, points, kind))
        if chart := draw_curves(title, curves, f"{watched.case}-{title.lower().replace(' ', '-')}", "frame"):
            charts.append((title, note, chart))
    return charts

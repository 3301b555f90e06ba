"""Renders the drift report: the findings, and the metrics of each frame as curves."""

import math
from collections.abc import Mapping, Sequence

from redline.evaluation.drift.case_run import CaseRun
from redline.evaluation.drift.findings import Finding
from redline.pages import ChartCard, render_page
from redline.pages.curves import Curve, draw_curves

# The title, description and metrics of each chart. The second metric is drawn in another colour.
_CHARTS = (
    ("Gain over the input", "PSNR against the clean image, minus the PSNR of the input, in dB.", ("gain_db",)),
    ("Flicker", "Warp error of the output and, in another colour, of the input.", ("flicker", "input_flicker")),
    ("Brightness", "Mean green value: logarithm of output / reference. 0 is ideal, a slope is drift.", ("green",)),
    ("Detail", "Mean difference from a blurred copy: logarithm of output / reference.", ("detail",)),
    ("Structure", "Structural distance of the output to the input.", ("distance",)),
)


def render_drift_page(
    name: str,
    about: str,
    runs: Sequence[CaseRun],
    findings: Sequence[Finding],
    controls: Mapping[str, Sequence[Finding]],
) -> str:
    return render_page(
        "redline.evaluation.drift",
        "page.html.jinja",
        name=name,
        meta=about,
        headline=headline(findings),
        findings=findings,
        cases=[(one.case, len(one.rows), _charts(one)) for one in runs],
        controls=[(control, [f for f in failed if not f.holds]) for control, failed in controls.items()],
    )


def headline(findings: Sequence[Finding]) -> str:
    failed = [finding for finding in findings if not finding.holds]
    if not failed:
        cases = list(dict.fromkeys(finding.case for finding in findings))
        return f"All {len(findings)} findings hold ({', '.join(cases)})."
    text = "; ".join(f"{finding.case}: {finding.sentence}" for finding in failed[:3])
    more = f", and {len(failed) - 3} more" if len(failed) > 3 else ""
    return f"{len(failed)} of {len(findings)} findings do not hold: {text}{more}."


def _charts(run: CaseRun) -> list[ChartCard]:
    charts = []
    for title, note, names in _CHARTS:
        curves = []
        for name, kind in zip(names, ("c0", "c1"), strict=False):
            points = tuple((i, v) for i, v in enumerate(run.series(name)) if math.isfinite(v))
            curves.append(Curve(name, points, kind))
        if chart := draw_curves(title, curves, f"{run.case}-{title.lower().replace(' ', '-')}", "frame"):
            charts.append(ChartCard(title, note, chart))
    return charts

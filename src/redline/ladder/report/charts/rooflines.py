"""The roofline chart: the measured ceilings of the machine in red, and the model before and after the climb."""

from redline.ladder.report.climb import Climb, Entry
from redline.ladder.report.roofline import place
from redline.notation import format_rate
from redline.pages.svg import Drawing, Scale, text_width


def draw_roofline(climb: Climb, width: int) -> Drawing | None:
    candidates = ((climb.baseline, "base"), (climb.compiled, "compiled"), (climb.result, "final"))
    entries = [(e, kind) for e, kind in candidates if e is not None and e.timed]
    points = [(e, kind, r) for e, kind in entries if (r := place(e.measurement)) is not None]
    if not points:
        return None
    dtypes = {e.measurement.precision: climb.machine.flops_per_s(e.measurement.precision) for e, _, _ in points}
    bandwidth = points[0][2].ceiling_bytes_per_s
    ridges = [peak / bandwidth for peak in dtypes.values()]
    heights, intensities = [r.achieved_flops_per_s for _, _, r in points], [r.intensity for _, _, r in points]
    height, left, right, top = int(min(380, width * 0.82)), 54, width - 14, 22
    x = Scale(min(*intensities, *ridges) / 4, max(*intensities, *ridges) * 5, left, right, log=True)
    y = Scale(min(heights) / 3.5, max(*heights, *dtypes.values()) * 2.2, height - 44, top, log=True)
    rates = (f"{_name(e)} {format_rate(r.achieved_flops_per_s, 'FLOP/s')}, {r.share:.0%}" for e, _, r in points)
    drawing = Drawing(width, height, "The roofline", f"Rate reached and share of the ceiling: {'; '.join(rates)}.")
    drawing.axes(x, y, left, ("{:g}".format, _short_rate), (6, 5))
    drawing.text((left + right) / 2, height - 6, "operations per byte moved →", "axis-title", "middle")
    drawing.text(left, 11, "FLOP/s", "axis-title")
    _draw_ceilings(drawing, dtypes, bandwidth, x, y)
    marks = [(x(r.intensity), y(r.achieved_flops_per_s)) for _, _, r in points]
    if len(marks) > 1:
        drawing.path(f"M{marks[0][0]:.1f} {marks[0][1]:.1f}L{marks[-1][0]:.1f} {marks[-1][1]:.1f}", "way")
    for (entry, kind, roofline), mark in zip(points, marks, strict=True):
        rate = format_rate(roofline.achieved_flops_per_s, "FLOP/s")
        drawing.point(*mark, 5.5, f"m-{kind}", f"{_name(entry)}: {rate}, bound by {roofline.bound}")
    for (entry, _, roofline), mark in reversed(list(zip(points, marks, strict=True))):
        drawing.label_point(*mark, f"{_name(entry)} · {roofline.share:.0%}", (left, top, width, y.start - 2))
    return drawing


def _short_rate(flops_per_s: float) -> str:
    number, _, unit = format_rate(flops_per_s, "FLOP/s").partition(" ")
    return f"{number}{unit[:1]}"


def _draw_ceilings(drawing: Drawing, dtypes: dict[str, float], bandwidth: float, x: Scale, y: Scale) -> None:
    top = max(dtypes.values())
    start = max(x.low, y.low / bandwidth)
    drawing.line(x(start), y(start * bandwidth), x(top / bandwidth), y(top), "limit")
    used: list[float] = []
    for dtype, peak in sorted(dtypes.items(), key=lambda item: -item[1]):
        drawing.line(x(peak / bandwidth), y(peak), x.end, y(peak), "limit")
        text_y = y(peak) - 6
        if any(abs(text_y - other) < 14 for other in used):
            text_y = y(peak) + 14
        used.append(text_y)
        drawing.limit_text(x.end, text_y, f"{dtype} {format_rate(peak, 'FLOP/s')}")
        drawing.taken.append((x(peak / bandwidth), y(peak) - 1, x.end, y(peak) + 1))
    middle = (max(start, x.low) * top / bandwidth) ** 0.5
    # Placed to the right of the line, because the labels of the axis are on its left.
    rate = format_rate(bandwidth, "B/s")
    drawing.limit_text(x(middle) + 10 + text_width(rate), y(middle * bandwidth) + 12, rate)


def _name(entry: Entry) -> str:
    return "torch.compile" if entry.row.role == "compile" else entry.label.partition("(")[0]

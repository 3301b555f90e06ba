"""The front chart: speed-up and peak memory of each plan; the plans of the Pareto front have their number and name."""

from redline.ladder.report.climb import Climb, format_ratio
from redline.notation import format_bytes
from redline.pages.svg import Drawing, Scale


def draw_front(climb: Climb, width: int) -> Drawing | None:
    front = climb.front
    if len(front) < 2:
        return None
    on_front = {point.plan for point in front}
    shown = [e for e in climb.entries if e.timed and e.row.peak_bytes and e.row.over_start]
    others = [(e.row.over_start or 1.0, e.row.peak_bytes or 0, e.row.plan) for e in shown if e.row.plan not in on_front]
    speeds = [point.speed.middle for point in front] + [speed for speed, _, _ in others]
    # Ticks of sizes are multiples of GiB or MiB.
    peaks = [point.peak_bytes for point in front] + [peak for _, peak, _ in others]
    size = 2**30 if max(peaks) >= 2**30 else 2**20
    height, left, right, top = int(min(340, width * 0.82)), 64, width - 14, 18
    bottom = height - 44
    x = Scale(min(0.9, *speeds) * 0.95, max(1.2, *speeds) * 1.08, left, right)
    y = Scale(0.0, max(peaks) / size * 1.1, bottom, top)
    words = "; ".join(
        f"{p.name} {format_ratio(p.speed.middle)} with {format_bytes(p.peak_bytes)}, {p.quality}" for p in front
    )
    drawing = Drawing(width, height, "The Pareto front", f"Speed-up and peak memory of the front: {words}.")
    drawing.axes(x, y, left, ("{:g}×".format, lambda count: format_bytes(count * size)), (6 if width > 400 else 4, 5))
    drawing.text((left + right) / 2, height - 6, "times faster than eager →", "axis-title", "middle")
    drawing.text(left, 9, "peak memory (lower is better)", "axis-title")
    for speed, peak, plan in others:
        tip = f"{plan}: {format_ratio(speed)}, {format_bytes(peak)}"
        drawing.point(x(speed), y(peak / size), 3.5, "m-faint", tip)
    for point in front:
        tip = f"{point.plan}: {format_ratio(point.speed.middle)}, {format_bytes(point.peak_bytes)}, {point.quality}"
        kind = "m-final" if point.is_answer else "m-kept"
        drawing.point(x(point.speed.middle), y(point.peak_bytes / size), 6, kind, tip)
    for point in sorted(front, key=lambda point: not point.is_answer):
        at = (x(point.speed.middle), y(point.peak_bytes / size))
        name = point.name if width > 400 and point.name != "between" else ""
        drawing.label_point(*at, f"{point.number} {name}".strip(), (left, 14.0, width, bottom - 2.0))
    return drawing

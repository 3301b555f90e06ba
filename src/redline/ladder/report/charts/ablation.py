"""The ablation chart: how much slower a step becomes without each rung of the final plan."""

from redline.ladder.report.climb import Climb, format_ratio
from redline.pages.svg import Drawing, Scale, text_width


def draw_ablation(climb: Climb, width: int) -> Drawing | None:
    bars = [(e, slowdown) for e in climb.ablations if (slowdown := e.slowdown_without) is not None]
    if not bars:
        return None
    bars.sort(key=lambda bar: -bar[1].middle)
    stacked = width < 480
    row, top = (38, 26) if stacked else (29, 28)
    notes = [format_ratio(s.middle) + ("" if e.row.verdict == "kept" else " · removed") for e, s in bars]
    left = 0 if stacked else min(230, 26 + max(text_width(e.row.rung) for e, _ in bars))
    right = width - (0 if stacked else 18 + max(map(text_width, notes)))
    height = top + row * len(bars) + 4
    words = "; ".join(f"{e.row.rung} {note}" for (e, _), note in zip(bars, notes, strict=True))
    drawing = Drawing(width, height, "What each rung is worth", f"Slowdown without the rung: {words}.")
    ends = [v for _, w in bars for v in (w.middle, *(() if w.low <= 0 else (w.high,)))]
    scale = Scale(min(1.0, *(w.middle for _, w in bars)), max(1.1, *ends) * 1.01, left, right)
    for tick in scale.ticks(4 if stacked else 8):
        drawing.line(scale(tick), top - 6, scale(tick), height - 4, "axis" if tick == 1 else "grid")
        anchor = "start" if tick == scale.low else "end" if scale(tick) > width - 16 else "middle"
        drawing.text(scale(tick), top - 12, f"{tick:.3g}×", "tick", anchor)
    for index, ((entry, slowdown), note) in enumerate(zip(bars, notes, strict=True)):
        y = top + index * row
        kept = entry.row.verdict == "kept"
        words = "strong" if kept else "quiet"
        label_y, bar_y, room = (
            (y + 12, y + 18, width - text_width(note) - 10) if stacked else (y + 17, y + 5, left - 14)
        )
        drawing.label(0, label_y, entry.row.rung, room, words)
        drawing.text(width, label_y, note, "figure" if kept else "quiet", "end")
        one, end = scale(1.0), scale(slowdown.middle)
        drawing.bar(min(one, end), bar_y, abs(end - one), 14, "m-kept" if kept else "m-faint", entry.row.reason)
        if slowdown.low > 0:
            low, high, middle = scale(slowdown.low), scale(slowdown.high), bar_y + 7
            ends = f"M{low:.1f} {middle - 3.5:.1f}v7M{high:.1f} {middle - 3.5:.1f}v7"
            drawing.path(f"M{low:.1f} {middle:.1f}H{high:.1f}{ends}", "whisker")
    return drawing

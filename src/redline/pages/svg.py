"""Drawing primitives for SVG. Colors are CSS classes, so that the style sheet sets them for light and dark."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from markupsafe import Markup, escape

_CHARACTER = 7.0  # average width of a bold character at 12 px
Box = tuple[float, float, float, float]


@dataclass
class Drawing:
    """An SVG drawing with a fixed size in pixels; all text is escaped."""

    width: int
    height: int
    title: str
    description: str
    parts: list[Markup] = field(default_factory=list)
    # Boxes that the label of a point must not overlap.
    taken: list[Box] = field(default_factory=list)

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str) -> None:
        form = '<line class="{}" x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}"/>'
        self.parts.append(Markup(form).format(kind, x1, y1, x2, y2))

    def bar(self, x: float, y: float, width: float, height: float, kind: str, tip: str = "") -> None:
        form = '<rect class="{}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}" rx="2">{}</rect>'
        self.parts.append(Markup(form).format(kind, x, y, max(width, 0.0), height, _tip(tip)))

    def dot(self, x: float, y: float, radius: float, kind: str, tip: str = "") -> None:
        form = '<circle class="{}" cx="{:.1f}" cy="{:.1f}" r="{:.1f}">{}</circle>'
        self.parts.append(Markup(form).format(kind, x, y, radius, _tip(tip)))

    def point(self, x: float, y: float, radius: float, kind: str, tip: str) -> None:
        """Draws a dot that the labels of points must not overlap."""
        self.dot(x, y, radius, kind, tip)
        self.taken.append((x - 6, y - 6, x + 6, y + 6))

    def dots(self, points: Sequence[tuple[float, float]], kind: str) -> None:
        """Draws many small points as one path: strokes of zero length with round caps."""
        self.path("".join(f"M{x:.1f} {y:.1f}h0" for x, y in points), kind)

    def path(self, data: str, kind: str) -> None:
        self.parts.append(Markup('<path class="{}" d="{}"/>').format(kind, data))

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "start", tip: str = "") -> None:
        form = '<text class="{}" x="{:.1f}" y="{:.1f}" text-anchor="{}">{}{}</text>'
        self.parts.append(Markup(form).format(kind, x, y, anchor, text, _tip(tip)))

    def label(self, x: float, y: float, text: str, room: float, kind: str = "", anchor: str = "start") -> None:
        """Draws text shortened to `room` pixels, with the full text as its tooltip."""
        short = shorten(text, room)
        self.text(x, y, short, kind, anchor, tip=text if short != text else "")

    def limit_text(self, x: float, y: float, text: str) -> None:
        """Draws the name of a limit, right-aligned at x; the labels of points must not overlap it."""
        self.text(x, y, text, "limit-text", "end")
        self.taken.append((x - text_width(text) - 2, y - 12, x + 2, y + 4))

    def label_point(self, x: float, y: float, text: str, inside: Box, kind: str = "") -> None:
        """Draws a label beside its point at the first free position; draws nothing if there is none."""
        w = text_width(text) * 0.95
        beside, above_or_below = ((9, 4), (-9 - w, 4)), ((-w / 2, -11), (-w / 2, 19))
        for dx, dy in (*beside, *above_or_below, (8, -8), (8, 17), (-8 - w, -8), (-8 - w, 17)):
            box = (x + dx, y + dy - 10, x + dx + w, y + dy + 3)
            fits = box[0] >= inside[0] and box[1] >= inside[1] and box[2] <= inside[2] and box[3] <= inside[3]
            if fits and not any(_overlap(box, other) for other in self.taken):
                self.taken.append(box)
                at, anchor = (box[0] + w, "end") if dx < -9 else (box[0], "start")
                self.text(at, y + dy, text, f"point {kind}", anchor)
                return

    def axes(
        self, x: "Scale", y: "Scale", left: float, write: Sequence[Callable[[float], str]], counts: tuple[int, int]
    ) -> None:
        """Draws the axes with about `counts` ticks; `write` formats the values of x and of y."""
        for tick in y.ticks(counts[1]):
            self.line(left, y(tick), x.end, y(tick), "grid")
            self.text(left - 8, y(tick) + 4, write[1](tick), "tick", "end")
        for tick in x.ticks(counts[0]):
            self.line(x(tick), y.start, x(tick), y.start + 4, "axis")
            self.text(x(tick), y.start + 17, write[0](tick), "tick", "middle")
        self.line(left, y.start, x.end, y.start, "axis")

    def svg(self, name: str) -> Markup:
        form = (
            '<svg class="w{d.width}" viewBox="0 0 {d.width} {d.height}" role="img" '
            'aria-labelledby="{name}-{d.width}-title {name}-{d.width}-desc">'
            '<title id="{name}-{d.width}-title">{d.title}</title>'
            '<desc id="{name}-{d.width}-desc">{d.description}</desc>{body}</svg>'
        )
        return Markup(form).format(d=self, name=name, body=Markup("").join(self.parts))

    def document(self, style: str) -> Markup:
        """Returns a standalone SVG file with `style` as its style sheet."""
        form = (
            '<svg xmlns="http://www.w3.org/2000/svg" width="{d.width}" height="{d.height}" '
            'viewBox="0 0 {d.width} {d.height}" role="img"><title>{d.title}</title><desc>{d.description}</desc>'
            "<style>{style}</style>{body}</svg>\n"
        )
        return Markup(form).format(d=self, style=Markup(style), body=Markup("\n").join(self.parts))


@dataclass(frozen=True)
class Scale:
    """Maps values to pixels, linearly or logarithmically."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            # Values below the scale, such as zero, are drawn at its start.
            value, low, high = math.log(max(value, low)), math.log(low), math.log(high)
        return self.start + (value - low) / ((high - low) or 1.0) * (self.end - self.start)

    def ticks(self, count: int = 6) -> list[float]:
        """Returns about `count` round values inside the scale."""
        # Uses linear steps on a logarithmic axis that spans less than a factor of four, which has too few round powers.
        if self.log and self.high > 4 * self.low:
            return self._log_ticks(count)
        step = _round_step((self.high - self.low) / max(count, 1))
        first = math.ceil(self.low / step - 1e-9)
        return [i * step for i in range(first, math.floor(self.high / step + 1e-9) + 1)]

    def _log_ticks(self, count: int) -> list[float]:
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        found: list[float] = []
        for digits in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7)):
            finer = [d * 10.0**e for e in decades for d in digits]
            finer = [v for v in finer if self.low * 0.999 <= v <= self.high * 1.001]
            if len(finer) > count and len(found) >= 2:
                break
            found = finer
        return found[:: math.ceil(len(found) / (count + 1))] if len(found) > count + 1 else found


def padded(values: Sequence[float], factor: float) -> tuple[float, float]:
    """Returns the range of positive values, widened by `factor` on both sides."""
    return min(values) / factor, max(values) * factor


def text_width(text: str) -> float:
    return len(text) * _CHARACTER


def shorten(text: str, room: float) -> str:
    fits = max(int(room / _CHARACTER), 2)
    return text if len(text) <= fits else text[: fits - 1].rstrip() + "…"


def _round_step(rough: float) -> float:
    if rough <= 0 or not math.isfinite(rough):
        return 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    return next(digit * power for digit in (1, 2, 2.5, 5, 10) if digit * power >= rough * 0.999)


def format_tick(value: float) -> str:
    """Formats powers of ten below 0.001 as 10⁻⁴ and other values as decimals."""
    power = round(math.log10(value)) if value > 0 else 0
    if power < -3 and math.isclose(value, 10.0**power):
        return "10" + str(power).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"{value:.4g}"


def _overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _tip(text: str) -> Markup:
    return Markup("<title>{}</title>").format(escape(text)) if text else Markup("")

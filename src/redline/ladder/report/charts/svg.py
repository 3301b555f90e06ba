"""Drawing primitives for SVG. Colors are CSS classes, so that the style sheet sets them for light and dark."""

import math
from collections.abc import Sequence
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
        self.parts.append(
            Markup('<line class="{}" x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}"/>').format(kind, x1, y1, x2, y2)
        )

    def bar(self, x: float, y: float, width: float, height: float, kind: str, tip: str = "") -> None:
        form = '<rect class="{}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}" rx="2">{}</rect>'
        self.parts.append(Markup(form).format(kind, x, y, max(width, 0.0), height, _tip(tip)))

    def dot(self, x: float, y: float, radius: float, kind: str, tip: str = "") -> None:
        form = '<circle class="{}" cx="{:.1f}" cy="{:.1f}" r="{:.1f}">{}</circle>'
        self.parts.append(Markup(form).format(kind, x, y, radius, _tip(tip)))

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

    def reserve(self, x: float, y: float, text: str, anchor: str = "start") -> None:
        """Keeps labels of points away from a text at a fixed position."""
        left = x - text_width(text) if anchor == "end" else x
        self.taken.append((left - 2, y - 12, left + text_width(text) + 2, y + 4))

    def label_point(self, x: float, y: float, text: str, inside: Box, kind: str = "") -> None:
        """Draws a label beside its point at the first free position; draws nothing if there is none."""
        w = text_width(text) * 0.95
        places = (
            (9, 4),
            (-9 - w, 4),
            (-w / 2, -11),
            (-w / 2, 19),
            (8, -8),
            (8, 17),
            (-8 - w, -8),
            (-8 - w, 17),
        )
        for dx, dy in places:
            box = (x + dx, y + dy - 10, x + dx + w, y + dy + 3)
            fits = box[0] >= inside[0] and box[1] >= inside[1] and box[2] <= inside[2] and box[3] <= inside[3]
            if fits and not any(_overlap(box, other) for other in self.taken):
                self.taken.append(box)
                self.text(
                    box[0] + w if dx < -9 else box[0],
                    y + dy,
                    text,
                    f"point {kind}",
                    "end" if dx < -9 else "start",
                )
                return

    def svg(self, name: str) -> Markup:
        form = (
            '<svg class="w{width}" viewBox="0 0 {width} {height}" role="img" '
            'aria-labelledby="{name}-{width}-title {name}-{width}-desc">'
            '<title id="{name}-{width}-title">{title}</title>'
            '<desc id="{name}-{width}-desc">{desc}</desc>{body}</svg>'
        )
        body = Markup("").join(self.parts)
        return Markup(form).format(
            width=self.width,
            height=self.height,
            name=name,
            title=self.title,
            desc=self.description,
            body=body,
        )

    def document(self, style: str) -> Markup:
        """Returns a standalone SVG file with `style` as its style sheet."""
        form = (
            '<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
            'role="img"><title>{title}</title><desc>{desc}</desc><style>{style}</style>{body}</svg>\n'
        )
        return Markup(form).format(
            width=self.width,
            height=self.height,
            title=self.title,
            desc=self.description,
            style=Markup(style),
            body=Markup("\n").join(self.parts),
        )


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
        # A logarithmic axis that spans less than a factor of four has too few round powers: linear steps instead.
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

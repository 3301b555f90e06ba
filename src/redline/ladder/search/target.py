"""A target: a time per step or a size at the peak that is good enough, so that a climb may stop."""

from dataclasses import dataclass

from redline.errors import RedlineError
from redline.ladder.measurement import Measurement
from redline.notation import format_bytes, format_seconds, parse_bytes, parse_seconds


@dataclass(frozen=True)
class Target:
    """One of the two."""

    seconds: float | None = None
    size_bytes: int | None = None

    @classmethod
    def parse(cls, text: str) -> "Target":
        for read in (lambda: cls(seconds=parse_seconds(text)), lambda: cls(size_bytes=parse_bytes(text))):
            try:
                return read()
            except RedlineError:
                continue
        raise RedlineError(f"{text!r} is neither a time (16ms) nor a size (8GiB).")

    def reached(self, row: Measurement) -> bool:
        """By the whole interval, in every shape."""
        if not row.samples:
            return False
        if self.seconds is not None:
            return all(row.interval_s(shape).high <= self.seconds for shape in row.shapes)
        return self.size_bytes is not None and row.peak_bytes <= self.size_bytes

    def sentence(self, row: Measurement) -> str:
        """Whether the row reached it, and by what."""
        verb = "was" if self.reached(row) else "was not"
        if self.size_bytes is not None:
            return f"{format_bytes(self.size_bytes)} {verb} reached: the peak is {format_bytes(row.peak_bytes)}"
        # The shape that is slowest is the one that decides.
        shape = max(row.shapes, key=lambda shape: row.interval_s(shape).high)
        seen = row.interval_s(shape)
        span = f"{format_seconds(seen.low)} – {format_seconds(seen.high)}"
        where = f" with {shape}" if shape else ""
        return f"{format_seconds(self.seconds or 0.0)} {verb} reached: a step takes {span}{where}"

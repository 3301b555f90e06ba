"""A target: a time per step, or a peak size of memory, at which a climb stops."""

from dataclasses import dataclass

from redline.errors import RedlineError
from redline.ladder.measurement import Measurement
from redline.notation import format_bytes, format_seconds, parse_bytes, parse_seconds


@dataclass(frozen=True)
class Target:
    """Either `seconds` per step or `size_bytes` at the peak."""

    seconds: float | None = None
    size_bytes: int | None = None

    @classmethod
    def parse(cls, text: str) -> "Target":
        for read in (lambda: cls(seconds=parse_seconds(text)), lambda: cls(size_bytes=parse_bytes(text))):
            try:
                return read()
            except RedlineError:
                continue
        raise RedlineError(f"unknown target {text!r}: write a time (16ms) or a size (8GiB).")

    def reached(self, row: Measurement) -> bool:
        """Returns whether the whole confidence interval is within the target, for every shape."""
        if not row.samples:
            return False
        if self.seconds is not None:
            return all(row.time_interval_s(shape).high <= self.seconds for shape in row.shapes)
        return self.size_bytes is not None and row.peak_bytes <= self.size_bytes

    def sentence(self, row: Measurement) -> str:
        """Returns a sentence that says whether the row reached the target, with the measured value."""
        verb = "was" if self.reached(row) else "was not"
        if self.size_bytes is not None:
            return f"{format_bytes(self.size_bytes)} {verb} reached: the peak is {format_bytes(row.peak_bytes)}"
        # The slowest shape decides.
        shape = max(row.shapes, key=lambda shape: row.time_interval_s(shape).high)
        seen = row.time_interval_s(shape)
        span = f"{format_seconds(seen.low)} – {format_seconds(seen.high)}"
        what = "the p99 is" if row.is_tail else "a step takes"
        where = f" with {shape}" if shape else ""
        return f"{format_seconds(self.seconds or 0.0)} {verb} reached: {what} {span}{where}"

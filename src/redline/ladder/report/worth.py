"""What a rung is worth in the final plan, from the measurement of that plan without it."""

from redline.ladder.report.climb import Entry
from redline.ladder.statistics import Interval


def worth_of(entry: Entry) -> Interval | None:
    """An ablation's ratio turned round: how many times slower a step gets without this rung."""
    last = entry.row.over_last
    if last is None or last.middle <= 0:
        return None
    if last.low <= 0:
        return Interval(1 / last.middle, 0.0, float("inf"))
    return Interval(1 / last.middle, 1 / last.high, 1 / last.low)

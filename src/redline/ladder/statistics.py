"""Medians, 99th percentiles and bootstrap intervals, which decide whether a difference in time is real or noise."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

# A climb makes about twenty decisions. With 95% intervals one of them would be wrong on average, so 99% is used.
CONFIDENCE = 0.99
_RESAMPLES = 2000
_FEW = 8
# The ratio of two plans is also computed from the quantile `_FAST` of their samples, which stalls do not affect. This
# second ratio only guards against stalls, so a lower confidence is enough for its interval.
_FAST, _FAST_CONFIDENCE = 0.2, 0.9
# To detect drift, the turns are split into at most this many consecutive blocks.
_BLOCKS = 6
# For a 99th percentile, a turn times `CALLS_PER_TURN` calls, and a comparison takes at least `_LEAST_TURNS` turns. Of
# `LEAST_CALLS` calls, ten are above the percentile; a 99% interval of the percentile needs at least 528 calls.
CALLS_PER_TURN, _LEAST_TURNS = 100, 10
LEAST_CALLS = CALLS_PER_TURN * _LEAST_TURNS


@dataclass(frozen=True)
class Interval:
    """An estimate with its confidence interval."""

    middle: float
    low: float
    high: float

    def __str__(self) -> str:
        """Formats a ratio, for example `1.23× (1.18–1.30)`."""
        return f"{self.middle:.2f}× ({self.low:.2f}–{self.high:.2f})"

    def above(self, value: float) -> bool:
        return self.low > value

    def below(self, value: float) -> bool:
        return self.high < value


def median(values: Sequence[float]) -> float:
    return float(np.median(np.asarray(values)))


def bounds(estimates: np.ndarray, confidence: float = CONFIDENCE) -> tuple[float, float]:
    tail = (1 - confidence) / 2
    low, high = np.quantile(estimates, (tail, 1 - tail))
    return float(low), float(high)


def median_interval(values: Sequence[float]) -> Interval:
    """Returns the median with a bootstrap interval."""
    data = np.asarray(values)
    if len(data) < 2:
        return Interval(median(values), float("-inf"), float("inf"))
    picks = np.random.default_rng(0).integers(0, len(data), (_RESAMPLES, len(data)))
    return Interval(median(values), *bounds(np.median(data[picks], axis=1)))


def percentile_99(values: Sequence[float]) -> float:
    """Returns the smallest value that at most 1% of the values exceed."""
    ordered = np.sort(np.asarray(values))
    return float(ordered[-1 - len(ordered) // 100])


def percentile_99_interval(values: Sequence[float]) -> Interval:
    """Returns the 99th percentile of calls with a bootstrap interval; `values` has `CALLS_PER_TURN` calls per turn.

    The bootstrap resamples whole turns, because a stall slows down several calls of one turn. With fewer than
    `LEAST_CALLS` calls there is no upper bound.
    """
    middle = percentile_99(values)
    if len(values) < LEAST_CALLS:
        return Interval(middle, median(values), float("inf"))
    turns = _in_turns(values)
    logs = np.log(_resampled_percentiles(turns, _resampled_turns(len(turns)))) - np.log(middle)
    return Interval(middle, *bounds(middle * np.exp(_few_turns(len(turns)) * logs)))


def unpaired_ratio(old: Sequence[float], new: Sequence[float], tail: bool = False) -> Interval:
    """Returns the ratio old / new of two separate runs: the bootstrap resamples each run on its own.

    The ratio is that of the medians or, with `tail`, of the 99th percentiles.
    """
    rng = np.random.default_rng(0)
    if tail:
        if min(len(old), len(new)) < LEAST_CALLS:
            return Interval(percentile_99(old) / percentile_99(new), 0.0, float("inf"))
        runs = [_in_turns(values) for values in (old, new)]
        first, second = (_resampled_percentiles(turns, _resampled_turns(len(turns), rng)) for turns in runs)
        ratio, wider = percentile_99(old) / percentile_99(new), _few_turns(min(map(len, runs)))
        return Interval(ratio, *bounds(ratio * (first / second / ratio) ** wider))
    a, b = np.asarray(old), np.asarray(new)
    ratios = np.median(a[rng.integers(0, len(a), (_RESAMPLES, len(a)))], axis=1) / np.median(
        b[rng.integers(0, len(b), (_RESAMPLES, len(b)))], axis=1
    )
    return Interval(float(np.median(a) / np.median(b)), *bounds(ratios))


def ratio_interval(pairs: Sequence[tuple[Sequence[float], Sequence[float]]], tail: bool = False) -> Interval:
    """Returns the ratio old / new of two plans that were timed in turns; `pairs` has one (old, new) per input shape.

    The machine's speed drifts, so a ratio is computed for each turn, and the bootstrap resamples the median of these
    ratios. A stall can slow down one plan for seconds, so the interval also covers the ratio of the plans' fast turns.
    If the turns depend on each other, the bootstrap underestimates the variation, so its interval is widened (see
    `_excess_variation`). The result over several shapes is the geometric mean.

    With `tail` the samples are calls, `CALLS_PER_TURN` in each turn, and the ratio is that of the 99th percentiles of
    all calls. The bootstrap then resamples whole turns, the same ones for both plans.
    """
    ratio = _percentile_ratio if tail else _ratio_interval
    return ratio(tuple((tuple(old), tuple(new)) for old, new in pairs))


# Cached, because a report needs the same ratios in its tables, its charts and its text.
@functools.lru_cache(maxsize=1024)
def _ratio_interval(pairs: tuple[tuple[tuple[float, ...], tuple[float, ...]], ...]) -> Interval:
    rng = np.random.default_rng(0)
    middle, paired, fast = 0.0, np.zeros(_RESAMPLES), np.zeros(_RESAMPLES)
    for old, new in pairs:
        count = min(len(old), len(new))
        if count < 2:
            return Interval(float(np.median(old) / np.median(new)), 0.0, float("inf"))
        old_logs, new_logs = np.log(np.asarray(old)[:count]), np.log(np.asarray(new)[:count])
        logs = old_logs - new_logs
        centre = float(np.median(logs))
        middle += centre
        if count < _FEW:
            # A bootstrap interval of so few samples is too narrow: uses their range, plus half of it on each side.
            half = (logs.max() - logs.min()) / 2
            ends = np.where(np.arange(_RESAMPLES) % 2, logs.min() - half, logs.max() + half)
            paired += ends
            fast += ends
            continue
        picks = rng.integers(0, count, (_RESAMPLES, count))
        paired += centre + _excess_variation(logs) * (np.median(logs[picks], axis=1) - centre)
        fast += np.quantile(old_logs[picks], _FAST, axis=1) - np.quantile(new_logs[picks], _FAST, axis=1)
    scale = 1 / len(pairs)
    lows, highs = zip(bounds(np.exp(paired * scale)), bounds(np.exp(fast * scale), _FAST_CONFIDENCE), strict=True)
    return Interval(float(np.exp(middle * scale)), min(lows), max(highs))


@functools.lru_cache(maxsize=64)
def _percentile_ratio(pairs: tuple[tuple[tuple[float, ...], tuple[float, ...]], ...]) -> Interval:
    middle, ends = 0.0, np.zeros(_RESAMPLES)
    for old, new in pairs:
        count = min(len(old), len(new))
        if count < 2 * CALLS_PER_TURN:
            return Interval(percentile_99(old) / percentile_99(new), 0.0, float("inf"))
        both = [_in_turns(values[:count]) for values in (old, new)]
        first, second = (np.log(percentile_99(values[:count])) for values in (old, new))
        middle += first - second
        if count < LEAST_CALLS:
            logs = np.subtract(*(np.log([percentile_99(turn) for turn in turns]) for turns in both))
            half = (logs.max() - logs.min()) / 2
            ends += np.where(np.arange(_RESAMPLES) % 2, logs.min() - half, logs.max() + half)
            continue
        turns = len(both[0])
        picks = _resampled_turns(turns)
        old_logs, new_logs = (np.log(_resampled_percentiles(turns, picks)) for turns in both)
        ends += first - second + _few_turns(turns) * (old_logs - new_logs - (first - second))
    scale = 1 / len(pairs)
    return Interval(float(np.exp(middle * scale)), *bounds(np.exp(ends * scale)))


def _few_turns(turns: int) -> float:
    """Returns how many times wider an interval must be because a bootstrap of few turns underestimates the variation.

    It is the ratio of the quantiles of Student's t and of the normal distribution, by Cornish and Fisher's expansion.
    """
    z, free = NormalDist().inv_cdf((1 + CONFIDENCE) / 2), turns - 1
    t = z + (z**3 + z) / (4 * free) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free**2)
    return float(t / z * np.sqrt(turns / free))


def _in_turns(calls: Sequence[float]) -> np.ndarray:
    """Returns the calls with a row for each turn; the calls of an incomplete turn are left out."""
    turns = len(calls) // CALLS_PER_TURN
    return np.asarray(calls)[: turns * CALLS_PER_TURN].reshape(turns, CALLS_PER_TURN)


def _resampled_turns(turns: int, rng: np.random.Generator | None = None) -> np.ndarray:
    """Returns how often each turn is in each resample."""
    rng = np.random.default_rng(0) if rng is None else rng
    return rng.multinomial(turns, np.full(turns, 1 / turns), _RESAMPLES)


def _resampled_percentiles(turns: np.ndarray, picks: np.ndarray) -> np.ndarray:
    """Returns the 99th percentile of the calls of each resample."""
    order = np.argsort(turns, axis=None)[::-1]
    # The percentile of a resample is almost always among the slowest quarter of all calls.
    order = order[: max(len(order) // 4, CALLS_PER_TURN)]
    exceeding = np.cumsum(picks[:, order // CALLS_PER_TURN], axis=1) > turns.size // 100
    place = np.where(exceeding.any(axis=1), exceeding.argmax(axis=1), len(order) - 1)
    return turns.ravel()[order][place]


def _excess_variation(logs: np.ndarray) -> float:
    """Returns how many times more the medians of consecutive blocks vary than if turns were independent; at least 1."""
    blocks = np.array_split(logs, min(_BLOCKS, len(logs) // 3))
    medians = np.array([np.median(block) for block in blocks])
    rest = np.concatenate([block - median for block, median in zip(blocks, medians, strict=True)])
    # A median of n independent values has 1.25 times the standard error of their mean.
    expected = 1.25 * rest.std() / np.sqrt(len(logs) / len(blocks))
    return max(1.0, float(medians.std(ddof=1) / expected)) if expected > 0 else 1.0

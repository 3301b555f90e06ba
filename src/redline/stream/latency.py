"""Measures the latency of frames by stage, and counts dropped frames by cause.

Each stage begins when the previous one ends, so their times add up to the latency:

- capture: from the capture of the frame until it enters the queue of the model (decoding, conversion)
- wait: in the queue
- copy_in, compute, copy_out: in the model, with the copies to the device and back
- display: waiting for the sink, and writing to it

While a stream runs, percentiles are exact over a window of the last frames, and counts, means and maxima cover all
frames. The final report covers all frames: if they do not fit in the window, percentiles come from a histogram with
buckets that are 1% wide, so that memory is bounded for any length of stream.
"""

import math
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from redline.errors import RedlineError

STAGES = ("capture", "wait", "copy_in", "compute", "copy_out", "display")
PERCENTILES = (50, 95, 99)
# The buckets cover times from one microsecond to three hours.
_SHORTEST_S, _RATIO, _BUCKETS = 1e-6, 1.01, 2320


class FrameTimes(NamedTuple):
    """Seconds that one frame spent in each stage, and the time at which it was shown."""

    capture_s: float
    wait_s: float
    copy_in_s: float
    compute_s: float
    copy_out_s: float
    display_s: float
    shown_s: float

    @property
    def stages_s(self) -> tuple[float, ...]:
        return self[:-1]


@dataclass(frozen=True)
class Distribution:
    """Statistics of one stage, or of the latency.

    Mean and maximum (`most_s`) cover all frames. Percentiles cover the window (all frames in the final report).
    """

    p50_s: float
    p95_s: float
    p99_s: float
    mean_s: float
    most_s: float


@dataclass(frozen=True)
class Report:
    """Statistics of frames. `jitter_s` is the mean change of latency from one frame to the next.

    `jitter_s` and `frames_per_s` cover the window (all frames in the final report); both are 0 below two frames.
    """

    frames: int
    window: int
    frames_per_s: float
    latency: Distribution
    jitter_s: float
    stages: Mapping[str, Distribution]
    drops: Mapping[str, int]


class Latency:
    """Collects the times of frames. One thread records; any thread may call the other methods."""

    def __init__(self, window: int = 1024) -> None:
        if window < 1:
            raise RedlineError(f"the window must hold at least one frame, not {window}.")
        self._lock = threading.Lock()
        self._window = window
        self._ring = np.zeros((window, len(STAGES) + 2))
        self._sums = np.zeros(len(STAGES) + 1)
        self._most = np.zeros(len(STAGES) + 1)
        self._counts = np.zeros((len(STAGES) + 1, _BUCKETS), dtype=np.int64)
        self._first_s = self._last_s = self._last_latency_s = self._changes_s = 0.0
        self._frames = 0
        self._drops: Counter[str] = Counter()

    def record(self, times: FrameTimes) -> None:
        latency_s = math.fsum(times.stages_s)
        row = np.array([*times.stages_s, latency_s, times.shown_s])
        if not np.isfinite(row).all():
            raise RedlineError(f"the times of a frame are not finite numbers: {times}.")
        buckets = (np.log(np.maximum(row[:-1], _SHORTEST_S) / _SHORTEST_S) / math.log(_RATIO)).astype(int)
        with self._lock:
            if self._frames:
                self._changes_s += abs(latency_s - self._last_latency_s)
            else:
                self._first_s = times.shown_s
            self._last_s, self._last_latency_s = times.shown_s, latency_s
            self._counts[np.arange(len(buckets)), np.minimum(buckets, _BUCKETS - 1)] += 1
            self._ring[self._frames % self._window] = row
            self._frames += 1
            self._sums += row[:-1]
            self._most = np.maximum(self._most, row[:-1])

    def drop(self, cause: str, count: int = 1) -> None:
        if count:
            with self._lock:
                self._drops[cause] += count

    def report(self) -> Report:
        """Returns statistics over the window of the last frames."""
        with self._lock:
            frames, kept = self._frames, min(self._frames, self._window)
            first = frames % self._window if frames > self._window else 0
            rows = np.roll(self._ring[:kept], -first, axis=0)
            means, most = self._sums / max(1, frames), self._most.copy()
            drops = dict(self._drops)
        distributions = [_from_values(*column) for column in zip(rows.T, means, most, strict=False)]
        lasted_s = float(rows[-1, -1] - rows[0, -1]) if kept > 1 else 0.0
        jitter_s = float(np.abs(np.diff(rows[:, -2])).mean()) if kept > 1 else 0.0
        return _report(frames, kept, lasted_s, jitter_s, distributions, drops)

    def report_all(self) -> Report:
        """Returns statistics over all frames."""
        with self._lock:
            frames = self._frames
            if frames > self._window:
                columns = zip(self._counts, self._sums / frames, self._most, strict=True)
                distributions = [_from_buckets(counts, float(mean), float(most)) for counts, mean, most in columns]
                lasted_s, jitter_s = self._last_s - self._first_s, self._changes_s / (frames - 1)
                return _report(frames, frames, lasted_s, jitter_s, distributions, dict(self._drops))
        return self.report()


def _report(
    frames: int, window: int, lasted_s: float, jitter_s: float, columns: list[Distribution], drops: dict[str, int]
) -> Report:
    """Returns the report. `columns` holds the distribution of each stage, then that of the total latency."""
    frames_per_s = (window - 1) / lasted_s if lasted_s > 0 else 0.0
    stages: dict[str, Distribution] = dict(zip(STAGES, columns, strict=False))
    return Report(frames, window, frames_per_s, columns[-1], jitter_s, stages, drops)


def _from_values(values: np.ndarray, mean_s: float, most_s: float) -> Distribution:
    if not len(values):
        return Distribution(0.0, 0.0, 0.0, 0.0, 0.0)
    p50_s, p95_s, p99_s = np.percentile(values, PERCENTILES).tolist()
    return Distribution(p50_s, p95_s, p99_s, float(mean_s), float(most_s))


def _from_buckets(counts: np.ndarray, mean_s: float, most_s: float) -> Distribution:
    """Estimates each percentile as the middle of its bucket."""
    total = np.cumsum(counts)
    buckets = np.searchsorted(total, np.array(PERCENTILES) / 100 * total[-1]).tolist()
    p50_s, p95_s, p99_s = (min(most_s, _SHORTEST_S * _RATIO ** (bucket + 0.5)) for bucket in buckets)
    return Distribution(p50_s, p95_s, p99_s, mean_s, most_s)

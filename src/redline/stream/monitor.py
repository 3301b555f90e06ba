"""Samples a stream once per second, for the terminal, the metrics file and the report.

The last line of the metrics file covers all frames, as the final table does. The memory for samples is bounded: when
3600 are stored, every other one is deleted, and from then on only half as many of the new ones are stored.
"""

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, asdict, dataclass, field, replace

import torch

from redline.machine.memory import MemoryMonitor
from redline.stream.engine import Engine
from redline.stream.frames import Clock
from redline.stream.latency import STAGES, Latency, Report

_TICK_S = 0.05
_MAX_SAMPLES = 3600


@dataclass(frozen=True)
class Sample:
    """One measurement of a running stream.

    `frames_per_s` and `busy_share` (device utilization) cover the time since the previous sample. The latencies cover
    the window of the last frames. If `is_whole`, all these values cover all frames of the stream instead. `peak_bytes`
    is the peak since the first frame.
    """

    time_s: float
    frames: int
    frames_per_s: float
    p50_s: float
    p95_s: float
    p99_s: float
    jitter_s: float
    stages_p50_s: Mapping[str, float]
    stages_p95_s: Mapping[str, float]
    stages_p99_s: Mapping[str, float]
    drops: Mapping[str, int]
    busy_share: float
    memory_bytes: int
    peak_bytes: int
    is_whole: bool = False

    def as_json(self) -> str:
        return json.dumps(asdict(self), allow_nan=False)


@dataclass(eq=False)
class Monitor:
    """A context in which a thread takes samples, passes each to `show`, and its JSON line to `write`.

    `stop` is called when the stream has run for `duration_s`, or when `stop_requested` is set, for example by a signal
    handler. If `show` or `write` raises, `fail` is called and `error` is set.
    """

    latency: Latency
    busy: Engine
    device: torch.device
    _: KW_ONLY
    every_s: float = 1.0
    duration_s: float | None = None
    stop_requested: threading.Event = field(default_factory=threading.Event)
    stop: Callable[[], None] = lambda: None
    fail: Callable[[Exception], None] = lambda error: None
    show: Callable[[Sample], None] = lambda sample: None
    write: Callable[[str], None] = lambda line: None
    clock: Clock = Clock()

    def __post_init__(self) -> None:
        self.samples: list[Sample] = []
        # A sample that covers all frames; None until the stream ends, or if there was no frame.
        self.summary: Sample | None = None
        self.error: Exception | None = None
        self._memory, self._ended = MemoryMonitor(str(self.device)), threading.Event()
        self._began_s: float | None = None
        self._began_busy_s = 0.0
        # Time, frames and busy seconds at the last sample.
        self._last = (0.0, 0, 0.0)
        self._thinning = self._taken = 0
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)

    def __enter__(self) -> "Monitor":
        self._last = (self.clock.now_s(), 0, self.busy.busy_s)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        now_s = self.clock.now_s()
        if self._began_s is None and self.latency.report().frames:
            # All frames came after the thread's last check, so it has not set the time of the first frame.
            self._began_s, self._began_busy_s = self._last[0], self._last[2]
        # Rates over a few milliseconds are meaningless.
        is_due = not self.samples or now_s - self._last[0] > self.every_s / 4
        if self._began_s is not None and self.error is None:
            try:
                if is_due:
                    self._take_sample(now_s)
                self.summary = self._summarize(now_s)
                self.write(self.summary.as_json() + "\n")
            except Exception as error:
                self.error = error

    def _run(self) -> None:
        next_s = 0.0
        try:
            while not self.clock.wait(_TICK_S, self._ended):
                now_s = self.clock.now_s()
                if self.stop_requested.is_set():
                    self.stop()
                if self._began_s is None:
                    if not self.latency.report().frames:
                        self._last = (now_s, 0, self.busy.busy_s)
                        continue
                    # The time counts from the first frame, so that it does not include the set-up.
                    self._began_s, next_s = now_s, now_s + self.every_s
                    self._last = (now_s, self.latency.report().frames, self.busy.busy_s)
                    self._began_busy_s = self.busy.busy_s
                    self._memory.reset()
                if now_s >= next_s:
                    # Missed samples are skipped, because rates over very short intervals are meaningless.
                    next_s += (1 + (now_s - next_s) // self.every_s) * self.every_s
                    self._take_sample(now_s)
                if self.duration_s is not None and now_s - self._began_s >= self.duration_s:
                    self.duration_s = None
                    self.stop()
        except Exception as error:
            self.error = error
            self.fail(error)

    def _take_sample(self, now_s: float) -> None:
        report, busy_s = self.latency.report(), self.busy.busy_s
        before_s, before_frames, before_busy_s = self._last
        passed_s = max(now_s - before_s, 1e-9)
        self._last = (now_s, report.frames, busy_s)
        frames_per_s, busy_share = (report.frames - before_frames) / passed_s, (busy_s - before_busy_s) / passed_s
        sample = self._sample(now_s, report, frames_per_s, busy_share)
        self._keep(sample)
        self.write(sample.as_json() + "\n")
        self.show(sample)

    def _summarize(self, now_s: float) -> Sample:
        report, passed_s = self.latency.report_all(), max(now_s - (self._began_s or 0.0), 1e-9)
        busy_share = (self.busy.busy_s - self._began_busy_s) / passed_s
        return replace(self._sample(now_s, report, report.frames_per_s, busy_share), is_whole=True)

    def _sample(self, now_s: float, report: Report, frames_per_s: float, busy_share: float) -> Sample:
        assert self._began_s is not None
        memory = self._memory.read()
        return Sample(
            time_s=now_s - self._began_s,
            frames=report.frames,
            frames_per_s=frames_per_s,
            p50_s=report.latency.p50_s,
            p95_s=report.latency.p95_s,
            p99_s=report.latency.p99_s,
            jitter_s=report.jitter_s,
            stages_p50_s={stage: report.stages[stage].p50_s for stage in STAGES},
            stages_p95_s={stage: report.stages[stage].p95_s for stage in STAGES},
            stages_p99_s={stage: report.stages[stage].p99_s for stage in STAGES},
            drops=report.drops,
            busy_share=min(1.0, busy_share),
            memory_bytes=memory.current_bytes,
            peak_bytes=memory.peak_bytes,
        )

    def _keep(self, sample: Sample) -> None:
        self._taken += 1
        if self._taken % (1 << self._thinning):
            return
        self.samples.append(sample)
        if len(self.samples) >= _MAX_SAMPLES:
            del self.samples[::2]
            self._thinning += 1

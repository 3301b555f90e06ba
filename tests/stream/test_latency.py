"""Latency statistics agree with numpy and take bounded memory."""

import numpy as np
import pytest

from redline.errors import RedlineError
from redline.stream.latency import STAGES, FrameTimes, Latency


def samples(count: int, seed: int) -> list[FrameTimes]:
    rng = np.random.default_rng(seed)
    shown = np.cumsum(rng.exponential(0.04, count))
    return [FrameTimes(*rng.gamma(2.0, 0.003, len(STAGES)).tolist(), float(at)) for at in shown]


@pytest.mark.parametrize(("count", "window"), [(1, 8), (5, 8), (8, 8), (9, 8), (1001, 64), (333, 1000)])
def test_statistics_agree_with_numpy(count: int, window: int) -> None:
    times = samples(count, seed=count)
    latency = Latency(window)
    for frame in times:
        latency.record(frame)
    report = latency.report()
    kept = times[-window:]
    assert report.frames == count and report.window == len(kept)
    for number, stage in enumerate(STAGES):
        spread = report.stages[stage]
        recent, every = [t.stages_s[number] for t in kept], [t.stages_s[number] for t in times]
        assert (spread.p50_s, spread.p95_s, spread.p99_s) == pytest.approx(np.quantile(recent, [0.5, 0.95, 0.99]))
        assert (spread.mean_s, spread.most_s) == pytest.approx((np.mean(every), max(every)))
    whole = [sum(t.stages_s) for t in kept]
    assert report.latency.p99_s == pytest.approx(np.quantile(whole, 0.99))
    if len(kept) > 1:
        assert report.jitter_s == pytest.approx(np.mean(np.abs(np.diff(whole))))
        assert report.frames_per_s == pytest.approx((len(kept) - 1) / (kept[-1].shown_s - kept[0].shown_s))


@pytest.mark.parametrize(("count", "window"), [(1, 8), (8, 8), (9, 8), (5001, 64)])
def test_at_the_end_all_figures_are_of_all_frames(count: int, window: int) -> None:
    times = samples(count, seed=count)
    latency = Latency(window)
    for frame in times:
        latency.record(frame)
    report = latency.report_all()
    every = [sum(t.stages_s) for t in times]
    assert report.frames == report.window == count
    assert [report.latency.p50_s, report.latency.p95_s, report.latency.p99_s] == pytest.approx(
        np.quantile(every, [0.5, 0.95, 0.99], method="inverted_cdf" if count > window else "linear"), rel=0.006
    )
    assert (report.latency.mean_s, report.latency.most_s) == pytest.approx((np.mean(every), max(every)))
    if count > 1:
        assert report.jitter_s == pytest.approx(np.mean(np.abs(np.diff(every))))
        assert report.frames_per_s == pytest.approx((count - 1) / (times[-1].shown_s - times[0].shown_s))


def test_a_slow_beginning_is_not_forgotten() -> None:
    latency = Latency(16)
    for number in range(90):
        latency.record(FrameTimes(0, 0, 0, 0.5, 0, 0, number / 2))
    for number in range(20):
        latency.record(FrameTimes(0, 0, 0, 0.01, 0, 0, 45 + number / 100))
    assert latency.report().latency.p99_s == 0.01 and latency.report().frames_per_s == pytest.approx(100)
    assert latency.report_all().latency.p50_s == pytest.approx(0.5, rel=0.006) and latency.report_all().frames_per_s < 3


def test_without_frames_the_report_is_zero() -> None:
    report = Latency().report_all()
    assert report.frames == 0 and report.latency.p99_s == report.jitter_s == report.frames_per_s == 0


def test_steady_frames_have_no_jitter() -> None:
    latency = Latency()
    for number in range(10):
        latency.record(FrameTimes(0.001, 0.002, 0, 0.01, 0, 0.004, number / 50))
    report = latency.report()
    assert report.jitter_s == 0 and report.frames_per_s == pytest.approx(50) and report.latency.p50_s == 0.017


def test_drops_are_counted_by_cause() -> None:
    latency = Latency()
    latency.drop("compute busy", 3)
    latency.drop("compute busy")
    latency.drop("sink busy", 2)
    latency.drop("never", 0)
    assert latency.report().drops == {"compute busy": 4, "sink busy": 2}


def test_memory_does_not_grow() -> None:
    latency = Latency(32)
    size = latency._ring.nbytes
    for frame in samples(500, 0):
        latency.record(frame)
    assert latency._ring.nbytes == size and latency._ring.shape[0] == 32


def test_what_is_no_time_is_refused() -> None:
    with pytest.raises(RedlineError, match=r"are not finite numbers.*\.$"):
        Latency().record(FrameTimes(0, 0, 0, float("nan"), 0, 0, 0))
    with pytest.raises(RedlineError, match=r"at least one frame, not 0\.$"):
        Latency(0)

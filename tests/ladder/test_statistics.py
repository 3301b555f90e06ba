"""The statistics: noise is not reported as a difference, and a real difference is found."""

import numpy as np
import pytest

from redline.ladder.measuring.trial import WORTHWHILE
from redline.ladder.statistics import (
    CALLS_PER_TURN,
    LEAST_CALLS,
    median_interval,
    percentile_99,
    percentile_99_interval,
    ratio_interval,
    unpaired_ratio,
)


def noisy(rng: np.random.Generator, mean: float, count: int, mood: np.ndarray) -> list[float]:
    """Simulates timings of a shared machine: drift that affects both arms, jitter, and rare outliers."""
    jitter = rng.lognormal(0, 0.03, count)
    outliers = np.where(rng.random(count) < 0.05, rng.uniform(1.2, 3, count), 1)
    return list(mean * mood * jitter * outliers)


def moods(rng: np.random.Generator, count: int) -> np.ndarray:
    return np.exp(np.cumsum(rng.normal(0, 0.02, count)))


def test_equal_arms_differ_in_at_most_5_of_100() -> None:
    rng = np.random.default_rng(1)
    differences = 0
    for _ in range(100):
        mood = moods(rng, 24)
        ratio = ratio_interval([(noisy(rng, 1e-3, 24, mood), noisy(rng, 1e-3, 24, mood))])
        differences += ratio.above(WORTHWHILE) or ratio.below(1 / WORTHWHILE)
    assert differences <= 5


@pytest.mark.parametrize("change", [0.9, 1.1])
def test_a_planted_difference_of_ten_percent_is_found(change: float) -> None:
    rng = np.random.default_rng(2)
    found = 0
    for _ in range(100):
        mood = moods(rng, 24)
        ratio = ratio_interval([(noisy(rng, 1e-3, 24, mood), noisy(rng, 1e-3 * change, 24, mood))])
        found += ratio.above(WORTHWHILE) if change < 1 else ratio.below(1.0)
    assert found >= 95


def test_pairing_tolerates_a_machine_that_halves_its_speed_midway() -> None:
    rng = np.random.default_rng(3)
    mood = np.where(np.arange(24) < 12, 1.0, 2.0)
    ratio = ratio_interval([(noisy(rng, 1.2e-3, 24, mood), noisy(rng, 1e-3, 24, mood))])
    assert ratio.above(1.1) and ratio.below(1.3)


def test_several_shapes_are_a_geometric_mean() -> None:
    ratio = ratio_interval([([4.0] * 8, [1.0] * 8), ([1.0] * 8, [1.0] * 8)])
    assert ratio.middle == pytest.approx(2.0) and ratio.low == pytest.approx(2.0)


def test_one_sample_decides_nothing() -> None:
    ratio = ratio_interval([([2.0], [1.0])])
    assert not ratio.above(WORTHWHILE) and not ratio.below(1.0)


def test_the_interval_contains_the_median() -> None:
    interval = median_interval(list(np.random.default_rng(4).normal(5, 1, 200)))
    assert interval.low < 5 < interval.high and interval.high - interval.low < 1


@pytest.mark.parametrize("count", [4, 5, 7])
def test_few_samples_give_a_wide_interval(count: int) -> None:
    rng = np.random.default_rng(5)
    told_apart = 0
    for _ in range(400):
        mood = moods(rng, count)
        ratio = ratio_interval([(noisy(rng, 1e-3, count, mood), noisy(rng, 1e-3, count, mood))])
        told_apart += ratio.above(WORTHWHILE) or ratio.below(1 / WORTHWHILE)
    assert told_apart <= 0.05 * 400


def beside_neighbors(rng: np.random.Generator, mean: float, count: int) -> list[float]:
    """Simulates turns on a machine with busy neighbors: a turn is quiet, or stalls for time slices, in bursts."""
    values, stalled = [], False
    for _ in range(count):
        stalled = rng.random() < (0.7 if stalled else 0.3)
        slices = rng.integers(1, 6) * 4e-3 if stalled else 0.0
        values.append(mean * rng.lognormal(0, 0.03) + slices)
    return values


def test_stalls_are_not_reported_as_a_difference() -> None:
    rng = np.random.default_rng(6)
    differences = 0
    for _ in range(100):
        ratio = ratio_interval([(beside_neighbors(rng, 2e-3, 24), beside_neighbors(rng, 2e-3, 24))])
        differences += ratio.above(WORTHWHILE) or ratio.below(1 / WORTHWHILE)
    assert differences <= 5


def test_stalls_never_turn_a_gain_into_a_loss() -> None:
    rng = np.random.default_rng(7)
    for _ in range(200):
        assert not ratio_interval([(beside_neighbors(rng, 2.6e-3, 24), beside_neighbors(rng, 2e-3, 24))]).below(1.0)


def test_one_arm_that_is_slow_for_half_of_the_time_decides_nothing() -> None:
    """The turns of a block depend on each other, so they count less than independent ones."""
    rng = np.random.default_rng(8)
    old = [1.0 * rng.lognormal(0, 0.01) for _ in range(24)]
    new = [(1.0 if turn < 11 else 1.5) * rng.lognormal(0, 0.01) for turn in range(24)]
    ratio = ratio_interval([(old, new)])
    assert not ratio.above(WORTHWHILE) and not ratio.below(1.0)


def calls(rng: np.random.Generator, turns: int = 12, slow: float = 0.02) -> list[float]:
    """Simulates calls of which a share is several times slower than the others."""
    times = rng.lognormal(0, 0.05, turns * CALLS_PER_TURN)
    return list(np.where(rng.random(len(times)) < slow, rng.uniform(2, 4, len(times)), 1) * times)


def test_99th_percentile_is_exceeded_by_one_in_a_hundred() -> None:
    assert percentile_99(range(1, 1001)) == 990 and percentile_99(range(1, 1200)) == 1188
    assert percentile_99([3.0, 1.0, 2.0]) == 3.0


def test_interval_of_a_99th_percentile_covers_it_and_needs_enough_calls() -> None:
    rng = np.random.default_rng(3)
    truth = percentile_99(calls(rng, 2000))
    intervals = [percentile_99_interval(calls(rng)) for _ in range(100)]
    assert sum(i.low <= truth <= i.high for i in intervals) >= 95
    assert np.median([i.high / i.low for i in intervals]) < 2.5
    assert percentile_99_interval(calls(rng, 9)).high == float("inf") and LEAST_CALLS == 1000


def test_tail_ratio_finds_a_shorter_tail_and_no_other_difference() -> None:
    rng = np.random.default_rng(4)
    pairs = [(calls(rng), calls(rng)) for _ in range(50)]
    ratios = [ratio_interval([pair], tail=True) for pair in pairs]
    assert sum(r.above(WORTHWHILE) or r.below(1 / WORTHWHILE) for r in ratios) <= 3
    # Equal medians, but only one plan has slow calls.
    steady = ratio_interval([(calls(rng), calls(rng, slow=0.0))], tail=True)
    assert steady.low > 1.5 and ratio_interval([(calls(rng)[:100], calls(rng, slow=0.0)[:100])]).low < 1.01
    assert unpaired_ratio(calls(rng), calls(rng, slow=0.0), tail=True).low > 1.5
    few = ratio_interval([(calls(rng)[:150], calls(rng)[:150])], tail=True)
    assert (few.low, few.high) == (0.0, float("inf"))


def test_a_stall_of_one_turn_makes_the_99th_percentile_uncertain() -> None:
    """All of its slow calls are in one turn, so the bootstrap must resample turns, not calls."""
    rng = np.random.default_rng(5)
    quiet, stalled = calls(rng, slow=0.0), calls(rng, slow=0.0)
    stalled[300:320] = [5.0] * 20
    ratio = ratio_interval([(quiet, stalled)], tail=True)
    assert ratio.middle < 0.3 and ratio.high > 0.9

"""The rules by which one plan is better than another: one case a line, for every objective."""

import pytest

from redline.errors import RedlineError
from redline.ladder.objective import ANY, Comparison, Objective
from redline.ladder.statistics import Interval

MIB = 2**20
FASTER, BARELY, SAME, SLIGHTLY_SLOWER, SLOWER = (
    Interval(1.3, 1.2, 1.4),
    Interval(1.02, 1.005, 1.04),
    Interval(1.0, 0.98, 1.02),
    Interval(0.97, 0.95, 0.99),
    Interval(0.8, 0.7, 0.9),
)
SPEED = (Objective.LATENCY, Objective.P99, Objective.THROUGHPUT, Objective.REQUESTS)


def comparison(ratio: Interval, percent: float = 100, device: str = "cuda:0") -> Comparison:
    """A candidate with so many percent of the incumbent's peak."""
    return Comparison(ratio, int(percent * MIB), 100 * MIB, device)


@pytest.mark.parametrize("objective", SPEED)
@pytest.mark.parametrize(
    ("seen", "better", "words"),
    [
        (comparison(FASTER), True, "1.30× (1.20–1.40) faster"),
        (comparison(FASTER, 300), True, "faster"),
        (comparison(BARELY), False, "no gain beyond the noise"),
        (comparison(SAME), False, "no gain beyond the noise"),
        (comparison(SAME, 89), True, "equally fast, and smaller: 100 MiB → 89 MiB, speed 1.00×"),
        (comparison(SAME, 91), False, "no gain beyond the noise"),
        (comparison(SAME, 81, "cpu"), False, "no gain beyond the noise"),
        (comparison(SAME, 79, "cpu"), True, "equally fast, and smaller"),
        (comparison(SLIGHTLY_SLOWER, 50), False, "slower: 0.97×"),
        (comparison(SLOWER), False, "slower: 0.80×"),
    ],
)
def test_speed_comes_first_and_memory_decides_between_equals(
    objective: Objective, seen: Comparison, better: bool, words: str
) -> None:
    judged, reason = objective.judge(seen)
    assert judged is better and words in reason


@pytest.mark.parametrize(
    ("seen", "better", "words"),
    [
        (comparison(SLOWER, 97), True, "smaller: 100 MiB → 97 MiB, speed 0.80×"),
        (comparison(FASTER, 103), False, "larger: 100 MiB → 103 MiB"),
        (comparison(FASTER, 99), True, "equal memory, and faster"),
        (comparison(FASTER, 101), True, "equal memory, and faster"),
        (comparison(BARELY), False, "equal memory, and not faster"),
        (comparison(SLOWER, 99), False, "equal memory, and not faster"),
        (comparison(SLOWER, 86, "cpu"), False, "equal memory, and not faster"),
        (comparison(FASTER, 114, "cpu"), True, "equal memory, and faster"),
        (comparison(FASTER, 120, "cpu"), False, "larger"),
    ],
)
def test_memory_objective_compares_peaks_first_and_then_speed(seen: Comparison, better: bool, words: str) -> None:
    judged, reason = Objective.MEMORY.judge(seen)
    assert judged is better and reason.startswith(words)


@pytest.mark.parametrize("objective", Objective)
def test_final_race_accepts_smaller_gains(objective: Objective) -> None:
    assert not objective.judge(comparison(BARELY))[0] and objective.judge(comparison(BARELY), ANY)[0]
    assert not objective.judge(comparison(SAME), ANY)[0]


@pytest.mark.parametrize(
    ("seen", "speed", "memory"),
    [
        (comparison(SAME), "same", "same"),
        (comparison(Interval(1.04, 1.03, 1.05)), "same", "same"),
        (comparison(FASTER), "faster", "faster"),
        (comparison(SLOWER), "slower", "slower"),
        (comparison(SAME, 106), "larger", "larger"),
        (comparison(SAME, 104), "same", "same"),
        (comparison(SAME, 124, "cpu"), "same", "same"),
        (comparison(SAME, 126, "cpu"), "larger", "larger"),
        (comparison(SAME, 94), "smaller", "smaller"),
        # Where they pull apart, the objective decides what is told.
        (comparison(SLOWER, 50), "slower", "smaller"),
        (comparison(FASTER, 200), "larger", "larger"),
        (comparison(SLOWER, 200), "slower", "larger"),
        (comparison(FASTER, 50), "faster", "smaller"),
        (Comparison(FASTER, 100 * MIB, 0, "cpu"), "faster", "faster"),
    ],
)
def test_a_later_run_against_an_earlier_one(seen: Comparison, speed: str, memory: str) -> None:
    assert [objective.change(seen) for objective in SPEED] == [speed] * len(SPEED)
    assert Objective.MEMORY.change(seen) == memory


def test_names() -> None:
    assert Objective.named("memory") is Objective.MEMORY
    with pytest.raises(
        RedlineError, match=r"unknown objective 'beauty': choose latency, p99, throughput, requests, memory\."
    ):
        Objective.named("beauty")


@pytest.mark.parametrize("objective", Objective)
@pytest.mark.parametrize(
    ("seen", "better", "words"),
    [
        # (incumbent 100 MiB)
        (Comparison(SLOWER, 90 * MIB, 100 * MIB, "cuda", 95 * MIB), True, "within --max-memory 95 MiB"),
        (Comparison(FASTER, 120 * MIB, 100 * MIB, "cuda", 110 * MIB), False, "above --max-memory 110 MiB: its peak is"),
        (Comparison(SLOWER, 60 * MIB, 100 * MIB, "cuda", 50 * MIB), True, "closer to --max-memory 50 MiB"),
        (Comparison(FASTER, 100 * MIB, 100 * MIB, "cuda", 50 * MIB), False, "above --max-memory 50 MiB"),
        (Comparison(FASTER, 100 * MIB, 100 * MIB, "cuda", 100 * MIB), True, ""),
    ],
)
def test_the_memory_limit_comes_before_every_objective(
    objective: Objective, seen: Comparison, better: bool, words: str
) -> None:
    judged, reason = objective.judge(seen)
    assert judged is better and reason.startswith(words)

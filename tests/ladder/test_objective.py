"""The rules by which one plan is better than another: one case a line, for every objective."""

import pytest

from redline.errors import RedlineError
from redline.ladder.objective import ANY, Duel, Objective
from redline.ladder.statistics import Interval

MIB = 2**20
FASTER, BARELY, SAME, SLIGHTLY_SLOWER, SLOWER = (
    Interval(1.3, 1.2, 1.4),
    Interval(1.02, 1.005, 1.04),
    Interval(1.0, 0.98, 1.02),
    Interval(0.97, 0.95, 0.99),
    Interval(0.8, 0.7, 0.9),
)
SPEED = (Objective.LATENCY, Objective.THROUGHPUT)


def duel(ratio: Interval, percent: float = 100, device: str = "cuda:0") -> Duel:
    """A candidate with so many percent of the incumbent's peak."""
    return Duel(ratio, int(percent * MIB), 100 * MIB, device)


@pytest.mark.parametrize("objective", SPEED)
@pytest.mark.parametrize(
    ("seen", "better", "words"),
    [
        (duel(FASTER), True, "1.30× (1.20–1.40) faster"),
        (duel(FASTER, 300), True, "faster"),
        (duel(BARELY), False, "no gain beyond the noise"),
        (duel(SAME), False, "no gain beyond the noise"),
        (duel(SAME, 89), True, "as fast, and smaller: 100 MiB → 89 MiB, speed 1.00×"),
        (duel(SAME, 91), False, "no gain beyond the noise"),
        (duel(SAME, 81, "cpu"), False, "no gain beyond the noise"),
        (duel(SAME, 79, "cpu"), True, "as fast, and smaller"),
        (duel(SLIGHTLY_SLOWER, 50), False, "slower: 0.97×"),
        (duel(SLOWER), False, "slower: 0.80×"),
    ],
)
def test_speed_comes_first_and_memory_decides_between_equals(
    objective: Objective, seen: Duel, better: bool, words: str
) -> None:
    judged, reason = objective.judge(seen)
    assert judged is better and words in reason


@pytest.mark.parametrize(
    ("seen", "better", "words"),
    [
        (duel(SLOWER, 97), True, "smaller: 100 MiB → 97 MiB, speed 0.80×"),
        (duel(FASTER, 103), False, "larger: 100 MiB → 103 MiB"),
        (duel(FASTER, 99), True, "as small, and faster"),
        (duel(FASTER, 101), True, "as small, and faster"),
        (duel(BARELY), False, "as small, and no faster"),
        (duel(SLOWER, 99), False, "as small, and no faster"),
        (duel(SLOWER, 86, "cpu"), False, "as small, and no faster"),
        (duel(FASTER, 114, "cpu"), True, "as small, and faster"),
        (duel(FASTER, 120, "cpu"), False, "larger"),
    ],
)
def test_for_memory_the_peak_comes_first_and_speed_counts_at_equal_size(seen: Duel, better: bool, words: str) -> None:
    judged, reason = Objective.MEMORY.judge(seen)
    assert judged is better and reason.startswith(words)


@pytest.mark.parametrize("objective", Objective)
def test_what_is_to_stay_may_be_faster_by_less(objective: Objective) -> None:
    assert not objective.judge(duel(BARELY))[0] and objective.judge(duel(BARELY), ANY)[0]
    assert not objective.judge(duel(SAME), ANY)[0]


@pytest.mark.parametrize(
    ("seen", "speed", "memory"),
    [
        (duel(SAME), "same", "same"),
        (duel(Interval(1.04, 1.03, 1.05)), "same", "same"),
        (duel(FASTER), "faster", "faster"),
        (duel(SLOWER), "slower", "slower"),
        (duel(SAME, 106), "larger", "larger"),
        (duel(SAME, 104), "same", "same"),
        (duel(SAME, 124, "cpu"), "same", "same"),
        (duel(SAME, 126, "cpu"), "larger", "larger"),
        (duel(SAME, 94), "smaller", "smaller"),
        # Where they pull apart, the objective decides what is told.
        (duel(SLOWER, 50), "slower", "smaller"),
        (duel(FASTER, 200), "larger", "larger"),
        (duel(SLOWER, 200), "slower", "larger"),
        (duel(FASTER, 50), "faster", "smaller"),
        (Duel(FASTER, 100 * MIB, 0, "cpu"), "faster", "faster"),
    ],
)
def test_a_later_run_against_an_earlier_one(seen: Duel, speed: str, memory: str) -> None:
    assert [objective.change(seen) for objective in SPEED] == [speed, speed]
    assert Objective.MEMORY.change(seen) == memory


def test_names() -> None:
    assert Objective.named("memory") is Objective.MEMORY
    with pytest.raises(RedlineError, match=r"unknown objective 'beauty': choose latency, throughput, memory\."):
        Objective.named("beauty")

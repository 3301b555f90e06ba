"""How often arms are sampled, in which order, and when sampling stops."""

from dataclasses import replace
from typing import Any

import pytest

from fake_arms import fake_arm
from redline.ladder.measuring import trial
from redline.ladder.measuring.trial import (
    TrialSpec,
    _clearly_slower,
    _decided,
    _steps_per_sample,
    compare_arms,
    geometric_mean_s,
    take_turns,
)
from redline.ladder.objective import Objective
from redline.ladder.statistics import LEAST_CALLS

SPEC = TrialSpec("a workload", {"": {}}, "cpu", {}, sampling_s=1000.0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now_s = [0.0]
    monkeypatch.setattr(trial.time, "monotonic", lambda: now_s[0])
    return now_s


@pytest.mark.parametrize(
    ("objective", "quickest_s", "slowest_s", "steps", "warm", "repeats"),
    [
        (Objective.LATENCY, 0.1, 0.2, 1, 1, 1),
        (Objective.LATENCY, 0.0001, 0.2, 5, 20, 1),
        (Objective.LATENCY, 0.1, 1.1, 1, 0, 1),
        (Objective.LATENCY, 0.1, 1.0, 1, 1, 1),
        (Objective.LATENCY, 0.002, 0.2, 1, 3, 1),
        (Objective.LATENCY, 0.002, 0.003, 1, 3, 6),
        (Objective.LATENCY, 1e-5, 2e-5, 50, 20, 20),
        (Objective.THROUGHPUT, 0.002, 0.2, 25, 3, 1),
        (Objective.THROUGHPUT, 1e-6, 0.2, 1000, 20, 1),
        (Objective.REQUESTS, 0.002, 0.003, 50, 3, 1),
        (Objective.LATENCY, 0.11, 0.2, 1, 0, 1),
        (Objective.REQUESTS, 0.2, 0.2, 8, 0, 1),  # two requests of each of four callers
    ],
)
def test_all_arms_take_the_same_number_of_steps(
    objective: Objective, quickest_s: float, slowest_s: float, steps: int, warm: int, repeats: int
) -> None:
    arms = [fake_arm("eager", slowest_s), fake_arm("bf16", quickest_s)]
    spec = replace(SPEC, objective=objective, callers=4 if objective is Objective.REQUESTS else 0)
    assert _steps_per_sample(arms, spec) == ({"": steps}, {"": warm}, {"": repeats})


def test_the_order_is_random_and_all_arms_are_sampled_equally(clock: list[float]) -> None:
    arms = [fake_arm("eager", 0.02, pid=1), fake_arm("bf16", 0.01, pid=2)]
    order: list[int] = []
    for one in arms:
        ask = one.worker.ask
        one.worker.ask = lambda *given, ask=ask, pid=one.worker.pid, **about: order.append(pid) or ask(*given, **about)
    taken = take_turns(arms, replace(SPEC, turns=(20, 24)))
    turns = list(zip(order[::2], order[1::2], strict=True))
    assert set(turns) == {(1, 2), (2, 1)}  # every turn has both arms, and either may come first
    assert len(taken[0][""]) == len(taken[1][""]) >= 4


def test_p99_takes_a_thousand_calls_even_after_the_deadline(clock: list[float]) -> None:
    arms: Any = [fake_arm("eager", 0.01), fake_arm("bf16", 0.01)]

    def calls(request: str, timeout_s: float, count: int, warm: dict[str, int]) -> dict[str, list[float]]:
        clock[0] += 1000.0
        return {"": [0.01] * count}

    for one in arms:
        one.worker.ask = calls
    taken = take_turns(arms, replace(SPEC, objective=Objective.P99, sampling_s=1.0))
    assert [len(samples[""]) for samples in taken] == [LEAST_CALLS, LEAST_CALLS]
    assert replace(SPEC, objective=Objective.P99).least_steps == LEAST_CALLS


def test_three_turns_suffice_for_a_much_slower_arm(clock: list[float]) -> None:
    assert len(take_turns([fake_arm("eager", 0.01), fake_arm("bf16", 0.02)], SPEC)[0][""]) == 3
    assert _clearly_slower([{"": [1.0, 1.0]}, {"": [1.6, 1.51]}], [""])
    assert not _clearly_slower([{"": [1.0, 1.0]}, {"": [1.6, 1.5]}], [""])


@pytest.mark.parametrize(("turn_s", "turns"), [(2.0, 8), (1.25, 9), (11.0, 4), (3.7, 5)])
def test_after_the_deadline_eight_turns_suffice_or_four_long_ones(
    turn_s: float, turns: int, clock: list[float]
) -> None:
    """Two arms share 10 s; after 5 more seconds fewer turns suffice."""
    arms: Any = [fake_arm("eager", 0.01), fake_arm("bf16", 0.01)]
    spent = replace(SPEC, turns=(100, 200), sampling_s=10.0)

    def sample(request: str, timeout_s: float, **about: Any) -> dict[str, float]:
        clock[0] += turn_s / 2
        return {"": 0.01}

    for one in arms:
        one.worker.ask = sample
    assert len(take_turns(arms, spent)[0][""]) == turns


def test_decided_if_the_interval_is_clear() -> None:
    def samples(seconds: float, noise: float, count: int = 12) -> dict[str, list[float]]:
        return {"": [seconds * (1 + noise * (turn % 3 - 1)) for turn in range(count)]}

    assert _decided([samples(1.0, 0.0)], [""]) and not _decided([samples(1.0, 0.0, 11)], [""])
    assert _decided([samples(2.0, 0.001), samples(1.0, 0.001)], [""])  # clearly faster
    assert _decided([samples(1.0, 0.001), samples(1.1, 0.001)], [""])  # clearly slower
    assert _decided([samples(1.0, 0.0), samples(1.0, 0.0)], [""])  # clearly equal
    assert not _decided([samples(2.0, 0.3), {"": samples(1.0, 0.3)[""][::-1]}], [""])  # interval too wide
    third = samples(1.0, 0.001)
    assert not _decided([{"": samples(1.004, 0.01)[""][::-1]}, samples(3.0, 0.001), third], [""])


def test_geometric_mean_over_shapes() -> None:
    assert geometric_mean_s({"a": [1.0, 1.0, 9.0], "b": [4.0]}) == 2.0
    small, large = fake_arm("eager", peak_bytes=5), fake_arm("bf16", peak_bytes=7)
    small.peak_bytes, large.peak_bytes = 5, 7
    comparison = compare_arms(SPEC, small, large, {"": [0.2] * 9}, {"": [0.1] * 9})
    assert comparison.ratio.middle == pytest.approx(2.0) and (
        comparison.candidate_bytes,
        comparison.incumbent_bytes,
    ) == (7, 5)

"""Times real processes in turns: equal arms do not differ, and a planted difference is found."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from redline.ladder.measuring.trial import Arm, TrialSpec, compare, compare_arms, measure_peak, open_arm, take_turns
from redline.ladder.measuring.worker_pool import WorkerPool
from redline.ladder.objective import WORTHWHILE, Objective
from redline.ladder.plan import Plan

WORKLOADS = str(Path(__file__).parents[2] / "tiny_workloads.py")


def spec(pool: WorkerPool, milliseconds: float) -> TrialSpec:
    """A workload of known duration; judged against itself."""
    seeds = (10, 11, 12)
    path = pool.scratch / "sleeper.pt"
    worker = pool.start()
    worker.ask(
        "reference",
        60,
        address=f"{WORKLOADS}:sleeper",
        shapes={"": {"milliseconds": milliseconds}},
        device="cpu",
        paths={seeds: str(path)},
        dtype="fp32",
    )
    worker.stop()
    return TrialSpec(
        f"{WORKLOADS}:sleeper",
        {"": {"milliseconds": milliseconds}},
        "cpu",
        {seeds: str(path)},
        turns=(12, 24),
    )


@pytest.fixture(scope="module")
def arms(quiet_pool: WorkerPool) -> Iterator[list[Arm]]:
    opened = [open_arm(quiet_pool, spec(quiet_pool, ms), Plan()) for ms in (2.0, 2.0, 2.2)]
    yield opened
    for arm in opened:
        arm.stop()


@pytest.mark.alone
@pytest.mark.parametrize(("times", "most"), [(10, 1), pytest.param(40, 2, marks=pytest.mark.slow)])
def test_equal_arms_rarely_differ(times: int, most: int, arms: list[Arm]) -> None:
    told_apart = 0
    for _ in range(times):
        old, new = take_turns(arms[:2], course_of_few_turns())
        ratio = compare(old, new)
        told_apart += ratio.above(WORTHWHILE) or ratio.below(1 / WORTHWHILE)
    assert told_apart <= most


@pytest.mark.alone
def test_a_planted_ten_percent_slow_down_is_found(arms: list[Arm]) -> None:
    """Uses as many turns as a climb, because on a noisy machine 24 may not be enough to decide."""
    found = 0
    for _ in range(10):
        spec = TrialSpec("sleeper", {"": {}}, "cpu", {})
        comparison = compare_arms(spec, arms[0], arms[2], *take_turns([arms[0], arms[2]], spec))
        better, why = Objective.LATENCY.judge(comparison)
        found += not better and why.startswith("slower")
    assert found >= 9


def course_of_few_turns() -> TrialSpec:
    return TrialSpec("sleeper", {"": {}}, "cpu", {}, turns=(12, 24))


@pytest.mark.alone
def test_the_same_number_of_turns_for_every_arm(arms: list[Arm]) -> None:
    taken = take_turns(arms, course_of_few_turns())
    assert len({len(samples[""]) for samples in taken}) == 1
    assert all(value > 1.9e-3 for samples in taken for value in samples[""])


def test_peak_memory_of_steady_steps(quiet_pool: WorkerPool, tmp_path: Path) -> None:
    """A convolution on a larger image has a higher peak; both are far below that of the process."""
    peaks = []
    for size in (64, 512):
        seeds, path = (10, 11, 12), str(tmp_path / f"{size}.pt")
        shapes = {"": {"size": size, "batch": 1}}
        worker = quiet_pool.start()
        address = f"{WORKLOADS}:convolutions"
        worker.ask(
            "reference",
            60,
            address=address,
            shapes=shapes,
            device="cpu",
            paths={seeds: path},
            dtype="fp32",
        )
        worker.stop()
        arm = open_arm(quiet_pool, TrialSpec(address, shapes, "cpu", {seeds: path}), Plan())
        measure_peak(arm, TrialSpec(address, shapes, "cpu", {}))
        peaks.append(arm.peak_bytes)
        arm.stop()
    activation = 24 * 512 * 512 * 4
    assert peaks[1] - peaks[0] > activation
    assert peaks[1] < 40 * activation


def test_a_wrong_output_fails_the_gate(pool: WorkerPool, tmp_path: Path) -> None:
    """The reference is the output of another function, so the gate must fail."""
    seeds, path = (10, 11, 12), str(tmp_path / "wrong.pt")
    torch.manual_seed(0)
    torch.save({"": [[torch.randn(8, 4)] for _ in seeds]}, path)
    arm = open_arm(pool, TrialSpec(f"{WORKLOADS}:perceptron", {"": {}}, "cpu", {seeds: path}), Plan())
    assert not arm.passed
    arm.stop()

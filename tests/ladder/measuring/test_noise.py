"""Decisions on a noisy machine, with real processes: equal plans do not differ, and a gain is found and never reversed.

Each comparison takes about three seconds; the neighbors are busy processes, one for each core.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from redline.ladder.measuring.trial import Arm, TrialSpec, compare, open_arm, take_turns
from redline.ladder.measuring.worker_pool import WorkerPool
from redline.ladder.objective import WORTHWHILE
from redline.ladder.plan import Plan
from redline.ladder.statistics import Interval

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(1800)]
ADDRESS = str(Path(__file__).parents[2] / "tiny_workloads.py") + ":rounds"
COMPARISONS = 100
# One thread, which is what a climb chooses beside other load.
PLAN = "threads" if torch.get_num_threads() > 1 else "eager"


def spec(pool: WorkerPool, rounds: int) -> TrialSpec:
    seeds, path = (10, 11, 12), str(pool.scratch / f"rounds-{rounds}.pt")
    shapes = {"": {"rounds": rounds}}
    worker = pool.start()
    about = {"address": ADDRESS, "shapes": shapes, "device": "cpu", "seeds": seeds, "path": path, "dtype": "fp32"}
    worker.ask("reference", 60, **about)
    worker.stop()
    return TrialSpec(ADDRESS, shapes, "cpu", {seeds: path}, sampling_s=3.0)


@pytest.fixture(params=["quiet", "neighbors"])
def arms(request: pytest.FixtureRequest) -> Iterator[list[Arm]]:
    """Two equal plans, and one that does 1.3 times the work."""
    count = (os.cpu_count() or 1) if request.param == "neighbors" else 0
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        with WorkerPool() as pool:
            opened = [open_arm(pool, spec(pool, rounds), Plan.parse(PLAN)) for rounds in (10, 10, 13)]
            yield opened
            for arm in opened:
                arm.stop()
    finally:
        for process in busy:
            process.kill()
            process.wait()


def ratio(old: Arm, new: Arm) -> Interval:
    return compare(*take_turns([old, new], TrialSpec("rounds", {"": {}}, "cpu", {}, sampling_s=3.0)))


def test_equal_plans_do_not_differ_in_95_of_100(arms: list[Arm]) -> None:
    found = [ratio(arms[0], arms[1]) for _ in range(COMPARISONS)]
    told_apart = [str(one) for one in found if one.above(WORTHWHILE) or one.below(1 / WORTHWHILE)]
    assert len(told_apart) <= 5, told_apart


def test_a_gain_of_1_3_is_found_in_90_of_100_and_never_reported_as_slower(arms: list[Arm]) -> None:
    found = [ratio(arms[2], arms[0]) for _ in range(COMPARISONS)]
    assert not [str(one) for one in found if one.below(1.0)]
    assert sum(one.above(WORTHWHILE) for one in found) >= 90, list(map(str, found))

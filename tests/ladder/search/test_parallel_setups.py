"""Parallel set-ups: each plan is ready or has failed before anything is timed, and discarded plans are stopped."""

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from patience import PATIENCE_S
from redline.ladder.measuring.trial import Arm, TrialSpec
from redline.ladder.measuring.worker_pool import WorkerFailed
from redline.ladder.plan import Plan
from redline.ladder.search import parallel_setups as setups
from redline.ladder.search.parallel_setups import ParallelSetups, may_run_in_parallel
from redline.machine.machine import Machine

GIB = 2**30


class Process:
    def __init__(self) -> None:
        self.stopped = False

    def stop(self) -> None:
        self.stopped = True

    def ask(self, request: str, timeout_s: float, **about: Any) -> dict[str, float]:
        assert request == "sample" and about == {"steps": {"": 1}, "warm": {"": 1}}
        return {"": 0.25}


def arm(plan: Plan) -> Arm:
    return Arm(plan, Process(), {}, False, 0, (), {}, (), "fp32", 0, {}, {}, "cuda:0")


@pytest.fixture
def opening(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[str], Arm]], ParallelSetups]:
    def with_opener(opener: Callable[[str], Arm]) -> ParallelSetups:
        def open_arm(pool: Any, spec: Any, plan: Plan, *about: Any) -> Arm:
            return opener(str(plan))

        monkeypatch.setattr(setups, "open_arm", open_arm)
        return ParallelSetups(None, TrialSpec("x", {"": {}}, "cpu", {}), Machine.detect("cpu"))

    return with_opener


def test_plans_are_set_up_in_parallel(opening: Any) -> None:
    meet = threading.Barrier(3, timeout=PATIENCE_S)  # breaks unless all three are there together

    def opener(plan: str) -> Arm:
        meet.wait()
        return arm(Plan.parse(plan))

    ahead = opening(opener)
    ahead.prepare(dict.fromkeys(map(Plan.parse, ("bf16", "fp16", "tf32")), 5.0))
    assert all(ahead.has(Plan.parse(plan)) for plan in ("bf16", "fp16", "tf32"))
    found = ahead.open(Plan.parse("fp16"))
    # How long a step takes was seen again when nothing else ran, and the row will say that it was set up in company.
    assert (
        str(found.plan) == "fp16" and found.step_s == {"": 0.25} and "in parallel with 2 other plans" in found.notes[0]
    )
    assert not ahead.has(Plan.parse("fp16"))


def test_failure_is_raised_when_the_plan_is_opened(opening: Any) -> None:
    def opener(plan: str) -> Arm:
        if plan == "bf16":
            raise WorkerFailed("refused", "this one is broken")
        return arm(Plan.parse(plan))

    ahead = opening(opener)
    ahead.prepare({Plan.parse("bf16"): 5.0, Plan.parse("fp16"): 5.0})
    with pytest.raises(WorkerFailed, match="broken"):
        ahead.open(Plan.parse("bf16"))
    assert ahead.open(Plan.parse("fp16")).passed


@pytest.mark.parametrize("kind", ["oom", "crash", "error"])
def test_failed_set_up_is_repeated_alone(opening: Any, kind: str) -> None:
    opened: list[str] = []
    arms: list[Arm] = []

    def opener(plan: str) -> Arm:
        opened.append(plan)
        if plan == "bf16" and opened.count("bf16") == 1:
            raise WorkerFailed(kind, "too little memory")
        arms.append(arm(Plan.parse(plan)))
        return arms[-1]

    ahead = opening(opener)
    ahead.prepare({Plan.parse("fp16"): 5.0, Plan.parse("bf16"): 5.0})
    assert str(ahead.open(Plan.parse("bf16")).plan) == "bf16"
    assert arms[0].worker.stopped and not ahead.has(Plan.parse("fp16"))


def test_discarded_set_ups_are_stopped(opening: Any) -> None:
    arms: list[Arm] = []

    def opener(plan: str) -> Arm:
        arms.append(arm(Plan.parse(plan)))
        return arms[-1]

    ahead = opening(opener)
    ahead.prepare({Plan.parse("fp16"): 5.0})
    ahead.prepare({Plan.parse("bf16"): 5.0})
    ahead.discard()
    assert [one.worker.stopped for one in arms] == [True, True]
    assert not ahead.has(Plan.parse("bf16"))


def test_out_of_memory_discards_prepared_plans(opening: Any) -> None:
    arms: list[Arm] = []

    def opener(plan: str) -> Arm:
        if plan == "bf16" and not arms[0].worker.stopped:
            raise WorkerFailed("oom", "too little memory")
        arms.append(arm(Plan.parse(plan)))
        return arms[-1]

    ahead = opening(opener)
    ahead.prepare({Plan.parse("fp16"): 5.0})
    assert str(ahead.open(Plan.parse("bf16")).plan) == "bf16"


def test_plans_that_time_kernels_are_set_up_alone() -> None:
    alone = ("compile(mode=max-autotune)", "cudnn_benchmark", "sdpa", "tensorrt", "onnxruntime(provider=cuda)")
    together = ("bf16", "compile(mode=reduce-overhead, freeze=true)", "sdpa(backend=flash)", "cuda_graph")
    plans = [Plan.parse(text) for text in (*alone, *together)]
    assert may_run_in_parallel(plans) == plans[len(alone) :]


@pytest.mark.parametrize(
    ("device", "cores", "peak_bytes", "host", "count"),
    [
        ("cuda:0", 16, 2 * GIB, 0, 4),
        ("cuda:0", 8, 2 * GIB, 0, 2),
        ("cuda:0", 2, 2 * GIB, 0, 1),
        ("cuda:0", 64, 20 * GIB, 0, 2),  # 0.8 × 80 GiB hold three: two beside the kept one
        ("cuda:0", 64, 70 * GIB, 0, 1),
        ("cuda:0", 64, 2 * GIB, 29, 1),
        ("cuda:0", 64, 2 * GIB, 31, 2),
        ("cpu", 64, 2 * GIB, 0, 1),
    ],
)
def test_number_of_parallel_set_ups_depends_on_cores_and_memory(
    device: str, cores: int, peak_bytes: int, host: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setups, "available_host_bytes", lambda: (host or 500) * GIB)
    machine = replace(Machine.detect("cpu"), device=device, cores=cores, device_bytes=80 * GIB)
    assert ParallelSetups(None, None, machine).at_once(peak_bytes) == count

"""A worker that crashes, hangs or runs out of memory raises WorkerFailed with the reason, and leaves no files."""

import os
import time
from pathlib import Path

import pytest
import torch

from redline.ladder.measuring.trial import TrialSpec, open_arm
from redline.ladder.measuring.worker_pool import WorkerFailed, WorkerPool
from redline.ladder.plan import Plan

WORKLOADS = str(Path(__file__).parents[2] / "tiny_workloads.py")


def reference(pool: WorkerPool, function: str, **options: object) -> str:
    path = str(pool.scratch / "reference.pt")
    worker = pool.start()
    try:
        worker.ask(
            "reference",
            60,
            address=f"{WORKLOADS}:{function}",
            shapes={"": options},
            device="cpu",
            seeds=[10, 11, 12],
            path=path,
            dtype="fp32",
        )
    finally:
        worker.stop()
    return path


def test_how_workers_end() -> None:
    with WorkerPool() as pool:
        scratch = pool.scratch
        torch.save({}, scratch / "empty.pt")
        references = {(10, 11, 12): str(scratch / "empty.pt")}
        for how, kind, words in (
            ("crash", "crash", "SIGSEGV"),
            ("oom", "oom", "out of memory"),
            ("hang", "timeout", "no result within 2 s"),
        ):
            spec = TrialSpec(f"{WORKLOADS}:dies", {"": {"how": how}}, "cpu", references, timeout_s=2)
            with pytest.raises(WorkerFailed, match=words) as failure:
                open_arm(pool, spec, Plan())
            assert failure.value.kind == kind
        good = pool.start()
        assert good.ask("machine", 60, device="cpu", measure=False)["device"] == "cpu"
        pid = good.pid
    assert not scratch.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        ("deaf", "does not react to the input"),
        ("deaf_training", "does not react to the input"),
        ("nan", "NaN or infinity"),
        ("raises", "this model is broken"),
        ("wrong_device", "tensor on meta while the model runs on cpu"),
        ("build_raises", "build\\(\\) raised RuntimeError: no weights here"),
        ("nothing", "returned NoneType"),
        ("absent", "has no function 'absent'"),
    ],
)
def test_a_workload_that_cannot_be_judged_is_refused(function: str, sentence: str, pool: WorkerPool) -> None:
    with pytest.raises(WorkerFailed, match=sentence):
        reference(pool, function)


@pytest.mark.alone
def test_forked_workers_start_fast(quiet_pool: WorkerPool) -> None:
    start = time.perf_counter()
    for _ in range(3):
        worker = quiet_pool.start()
        worker.ask("machine", 60, device="cpu", measure=False)
        worker.stop()
    assert (time.perf_counter() - start) / 3 < 2.0

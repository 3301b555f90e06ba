"""threads: every call runs with the plan's number of threads, and the process keeps its own."""

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from redline.errors import RungError
from redline.ladder.job import Job
from redline.ladder.plan import Plan, Unavailable
from redline.ladder.rungs.threads import Threads
from redline.machine import cores
from redline.machine.machine import Machine

MACHINE = replace(Machine.detect("cpu"), cores=max(2, Machine.detect("cpu").cores))


class Tells(nn.Module):
    """Returns the number of threads and of cores that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tensor([torch.get_num_threads(), len(os.sched_getaffinity(0))])


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def told(rung: Threads) -> tuple[list[float], str]:
    plan, job = Plan((rung,)).build(Job.of(Tells()), MACHINE)
    output = job.finish()(torch.zeros(2)).tolist()
    return output, plan.rungs[0].proof(job)


def test_calls_run_with_this_number_of_threads_and_the_process_keeps_its_own() -> None:
    own = os.sched_getaffinity(0)
    assert told(Threads(1)) == ([1, len(own)], "1 thread instead of 2")
    assert told(Threads(1, pin=True)) == ([1, 1], "1 thread instead of 2, pinned to 1 core")
    assert torch.get_num_threads() == 2 and os.sched_getaffinity(0) == own


def test_an_error_in_the_call_restores_the_threads() -> None:
    job = Threads(1, pin=True).apply(Job.of(Tells()))
    own = os.sched_getaffinity(0)
    with pytest.raises(TypeError):
        job.finish()()
    assert torch.get_num_threads() == 2 and os.sched_getaffinity(0) == own


def test_engines_of_later_rungs_see_the_number() -> None:
    pytest.importorskip("onnxruntime")
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    _, job = Plan.parse("threads + onnxruntime").build(Job.of(model, (x,)), MACHINE)
    job.finish()(x)
    (engine,) = job.evidence["onnxruntime"].engines.values()
    assert engine._run._session.get_session_options().intra_op_num_threads == 1


def test_it_trains_alike() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    losses = []
    for plan in ("eager", "threads"):
        job = Job.of(
            model, loss=lambda y, _: y.square().mean(), optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1)
        )
        step = Plan.parse(plan).build(job, MACHINE)[1].finish()
        losses.append([float(step(x)) for _ in range(3)])
    assert losses[0] == pytest.approx(losses[1])


def test_variants_differ_from_the_number_that_torch_uses() -> None:
    assert [str(rung) for rung in Threads.variants(replace(MACHINE, cores=2))] == ["threads"]
    counts = [rung.count for rung in Threads.variants(replace(MACHINE, cores=8)) if isinstance(rung, Threads)]
    assert counts[:3] == [1, 4, 8]


def test_pinning_needs_cores_that_stay_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("redline.ladder.rungs.threads.physical_cores", lambda: (0, 2, 4, 6))
    assert str(Threads.variants(replace(MACHINE, cores=8))[-1]) == "threads(count=4, pin=true)"
    assert "needs 5 cores" in Threads(5, pin=True).why_not(replace(MACHINE, cores=8))


def test_it_says_why_it_cannot_apply() -> None:
    assert Threads().why_not(replace(MACHINE, device="cuda:0")) == "the model runs on a GPU"
    assert Threads(99).why_not(replace(MACHINE, cores=2)).startswith("99 threads need as many cores")
    with pytest.raises(Unavailable, match="torch uses 2 threads already"):
        Plan((Threads(2),)).build(Job.of(Tells()), MACHINE)
    with pytest.raises(RungError, match="at least 1"):
        Threads(0)


def test_one_hardware_thread_of_each_core() -> None:
    found = cores.physical_cores()
    assert found and set(found) <= os.sched_getaffinity(0) and len(set(found)) == len(found)

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from redline.errors import RedlineError, WorkloadError
from redline.ladder import batch_size
from redline.ladder.batch_size import (
    ModelCase,
    Probe,
    WorkloadCase,
    find_optimal_batch_size,
    search,
)
from redline.ladder.measuring.worker_pool import WorkerPool
from redline.machine.memory import is_out_of_memory

GIBIBYTE = 2**30


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a child process import this module by its name."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))


@pytest.fixture
def lent(monkeypatch: pytest.MonkeyPatch, pool: WorkerPool) -> None:
    """The session's workers."""
    monkeypatch.setattr(batch_size, "WorkerPool", lambda: contextlib.nullcontext(pool))


def tiny() -> nn.Module:
    return nn.Linear(4, 4)


def rows(batch: int) -> Tensor:
    return torch.randn(batch, 4)


def far_too_many(batch: int) -> Tensor:
    return torch.ones(4 * 2**20, 4) if batch == 1 else torch.empty(1000 * GIBIBYTE)


def deadly(batch: int) -> Tensor:
    if batch > 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return rows(batch)


def wrong(batch: int) -> Tensor:
    return torch.randn(batch, 3)


def sleepy(batch: int) -> Tensor:
    time.sleep(600)
    return rows(batch)


def squared(output: Tensor, batch: Any) -> Tensor:
    return output.square().mean()


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters)


def measured_by(monkeypatch: pytest.MonkeyPatch, probe: Callable[[int], Probe]) -> None:
    monkeypatch.setattr(batch_size, "_probe_in_child", lambda case, batch, *rest: (probe(batch), "sample"))


@pytest.mark.parametrize("largest", [1, 2, 3, 7, 8, 100, 129])
@pytest.mark.parametrize("start", [1, 5, 64])
@pytest.mark.parametrize("known", [True, False])
def test_search_finds_the_largest_batch_that_fits(
    monkeypatch: pytest.MonkeyPatch, largest: int, start: int, known: bool
) -> None:
    def probe(batch: int) -> Probe:
        if batch > largest and not known:
            return Probe(batch, False, reason="out of memory")
        return Probe(batch, True, batch * 10, 1.0, batch)

    measured_by(monkeypatch, probe)
    seen: list[Probe] = []
    result = search(
        ModelCase(tiny, rows),
        start,
        target_utilization=0.5,
        device="cpu",
        memory_bytes=largest * 20 + 8,
        on_probe=seen.append,
    )
    assert result.batch == largest and result.peak_bytes == largest * 10
    assert result.budget_bytes == largest * 10 + 4 and result.stopped_by == "memory"
    assert tuple(seen) == result.tried and len(seen) <= 16
    assert len({p.batch for p in seen}) == len(seen), "no batch is run twice"
    refused = next(p for p in seen if p.batch == largest + 1)
    assert not refused.fits and refused.reason


def test_search_stops_at_max_batch_and_reports_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    measured_by(monkeypatch, lambda batch: Probe(batch, True, batch, 1.0, 100 - abs(batch - 8)))
    result = search(ModelCase(tiny, rows), max_batch=50, device="cpu")
    assert [p.batch for p in result.tried] == [1, 2, 4, 8, 16, 32, 50]
    assert result.batch == 50 and result.stopped_by == "max_batch"
    assert result.fastest.batch == 8


def test_error_if_no_batch_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    measured_by(monkeypatch, lambda batch: Probe(batch, False, reason="out of memory"))
    with pytest.raises(RedlineError, match="not even a batch of 1 fits in 850 B: out of memory"):
        search(ModelCase(tiny, rows), starting_batch_size=8, device="cpu", memory_bytes=1000)


@pytest.mark.usefixtures("lent")
def test_invalid_arguments_raise() -> None:
    for options in ({"target_utilization": 0.0}, {"target_utilization": 1.5}, {"starting_batch_size": 0}):
        with pytest.raises(RedlineError):
            find_optimal_batch_size(tiny, rows, device="cpu", **options)
    with pytest.raises(RedlineError, match="loss= and optimizer="):
        find_optimal_batch_size(tiny, rows, device="cpu", training=True)
    lock = threading.Lock()
    with pytest.raises(RedlineError, match="cannot be pickled: .*lock"):
        find_optimal_batch_size(tiny, lambda n: lock, device="cpu")


@pytest.mark.usefixtures("lent")
def test_lambdas_run_in_the_child_process() -> None:
    assert find_optimal_batch_size(tiny, lambda n: torch.randn(n, 4), device="cpu", max_batch=1).batch == 1


@pytest.mark.usefixtures("lent")
def test_training_steps_do_not_change_the_users_model() -> None:
    model = tiny()
    before, pointer = model.weight.detach().clone(), model.weight.data_ptr()
    result = find_optimal_batch_size(model, rows, device="cpu", max_batch=1, loss=squared, optimizer=adam)
    assert result.batch == 1 and result.stopped_by == "max_batch"
    (probe,) = result.tried
    assert probe.seconds and probe.items_per_s == pytest.approx(1 / probe.seconds)
    assert torch.equal(model.weight, before) and model.weight.data_ptr() == pointer
    assert model.weight.grad is None and not model.weight.is_shared()


@pytest.mark.usefixtures("lent")
def test_a_killed_child_means_that_the_batch_does_not_fit() -> None:
    result = find_optimal_batch_size(tiny, deadly, device="cpu")
    assert result.batch == 1
    assert result.tried[1] == Probe(2, False, reason="the process died of SIGKILL (out of memory?)")


@pytest.mark.usefixtures("lent")
def test_an_allocation_beyond_the_limit_means_that_the_batch_does_not_fit() -> None:
    result = find_optimal_batch_size(tiny, far_too_many, device="cpu", memory_bytes=GIBIBYTE)
    assert result.batch == 1
    # 64 MiB of input and as much of output, and temporary memory of the libraries.
    assert 128 * 2**20 <= result.peak_bytes < 200 * 2**20
    assert result.tried[1] == Probe(2, False, reason="out of memory")


@pytest.mark.usefixtures("lent")
def test_an_error_of_the_users_code_is_one_sentence() -> None:
    with pytest.raises(RedlineError, match="a batch of 1 raised RuntimeError: mat1 and mat2"):
        find_optimal_batch_size(tiny, wrong, device="cpu")


def test_a_batch_beyond_the_time_limit_does_not_fit(pool: WorkerPool) -> None:
    answer, _ = batch_size._probe_in_child(ModelCase(tiny, sleepy), 4, GIBIBYTE, 0.5, lambda: pool)
    assert answer == Probe(4, False, reason="it took longer than 500 ms")


def test_is_out_of_memory_checks_the_causes() -> None:
    outer = WorkloadError("build() raised")
    outer.__cause__ = torch.OutOfMemoryError("CUDA out of memory")
    assert is_out_of_memory(outer) and is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"))
    assert not is_out_of_memory(RuntimeError("shapes cannot be multiplied")) and not is_out_of_memory(None)


WORKLOAD = """
import torch
from redline import Workload

def mine(batch: int = 1, width: int = 4) -> Workload:
    model = lambda: torch.nn.Linear(width, width)
    return Workload(build=model, inputs=lambda seed: torch.randn(batch, width))

def fixed() -> Workload:
    return Workload(build=lambda: torch.nn.Linear(3, 3), inputs=lambda seed: torch.randn(2, 3))
"""


@pytest.fixture
def workload_file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(WORKLOAD)
    return path


def test_a_workload_without_items_counts_its_batch(workload_file: Path) -> None:
    step, items, unit = WorkloadCase(f"{workload_file}:mine", {"width": 6}).open(5, "cpu")
    output = step()
    assert isinstance(output, Tensor) and output.shape == (5, 6) and (items, unit) == (5.0, "sample")


@pytest.mark.usefixtures("lent")
def test_the_command(workload_file: Path) -> None:
    from redline.cli import app

    asked = ["batch-size", f"{workload_file}:mine", "--max-batch", "2", "--start", "2", "--device", "cpu"]
    seen = CliRunner().invoke(app, [*asked, "--memory", "1GiB", "--json"])
    assert seen.exit_code == 0, seen.output
    data = json.loads(seen.stdout)
    assert data["batch"] == 2 and data["budget_bytes"] == int(0.85 * GIBIBYTE)
    assert data["fastest"]["batch"] == 2 and data["tried"][0]["fits"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"make_inputs": rows}, "a workload has its own"),
        ({"loss": squared}, "a workload has its own"),
        ({"options": {"batch": 3}}, "the search sets the option batch"),
    ],
)
def test_a_workload_knows_its_own_step(arguments: dict[str, Any], sentence: str, workload_file: Path) -> None:
    with pytest.raises(RedlineError, match=sentence):
        find_optimal_batch_size(f"{workload_file}:mine", **arguments)
    with pytest.raises(RedlineError, match="a model needs make_inputs="):
        find_optimal_batch_size(tiny)


def test_the_command_needs_a_workload_with_the_option_batch(workload_file: Path) -> None:
    from redline.cli import app

    seen = CliRunner().invoke(app, ["batch-size", f"{workload_file}:fixed", "--device", "cpu"])
    assert isinstance(seen.exception, WorkloadError) and "takes no option 'batch'" in str(seen.exception)
    seen = CliRunner().invoke(app, ["batch-size", f"{workload_file}:mine", "--shape", "batch=3"])
    assert isinstance(seen.exception, RedlineError) and "--max-batch" in str(seen.exception)


@pytest.mark.gpu
def test_the_gpu_search_keeps_the_budget_and_restores_the_allocator() -> None:
    """Runs in its own process, because memory of other tests in the allocator would count against the budget."""
    script = """
import torch
from torch import nn
from redline.ladder.batch_size import find_optimal_batch_size

torch.zeros(1, device="cuda")
before = torch.cuda.memory_allocated()
rows = lambda batch: torch.empty(batch, 4 * 2**20)  # 16 MiB each
result = find_optimal_batch_size(nn.Identity, rows, device="cuda", memory_bytes=2**30, target_utilization=0.5)
print(result)
assert result.stopped_by == "memory" and 28 <= result.batch <= 32, result.batch
assert any(p.reason == "out of memory" and p.peak_bytes is None for p in result.tried)
assert torch.cuda.memory_allocated() == before
assert abs(torch.cuda.get_per_process_memory_fraction("cuda:0") - 1.0) < 1e-6
torch.empty(2 * 2**30, dtype=torch.uint8, device="cuda")  # the limit is lifted again
"""
    seen = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert seen.returncode == 0, seen.stdout + seen.stderr

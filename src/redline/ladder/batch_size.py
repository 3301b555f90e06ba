"""The largest batch that fits: doubling until memory runs out, then bisection.

Every batch is really run. On a GPU the allocator is held to the budget, and its out-of-memory error is caught
and cleaned up. On a CPU memory runs out less politely (the kernel ends the process), so each batch runs in a
child process: one that is killed, or that reaches its limit, is an ordinary answer. The times are kept,
because the largest batch is not always the fastest.
"""

import copy
import gc
import multiprocessing
import pickle
import resource
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from redline.errors import RedlineError
from redline.ladder.job import Job
from redline.ladder.workload import Inputs, LossFunction, OptimizerFactory, call
from redline.ladder.workloads.addresses import load_workload
from redline.machine.host_memory import available_host_bytes, resident_bytes
from redline.machine.machine import resolve_device
from redline.machine.memory import MemoryMonitor, is_out_of_memory
from redline.notation import format_bytes, format_seconds

# Address space is not memory: threads' stacks and arenas reserve some that is never touched.
_ADDRESS_HEADROOM = 2 * 2**30


@dataclass(frozen=True)
class Probe:
    """One batch that was tried."""

    batch: int
    fits: bool
    # What it took at its peak; None when it ran out before that could be seen.
    peak_bytes: int | None = None
    seconds: float | None = None
    items_per_s: float | None = None
    # Why it does not fit.
    reason: str = ""


@dataclass(frozen=True)
class BatchSizeResult:
    """The largest batch that fits, and everything that was tried on the way."""

    batch: int
    peak_bytes: int
    budget_bytes: int
    tried: tuple[Probe, ...]
    # What ended the search: "memory", "max_batch" or "time".
    stopped_by: str
    unit: str = "sample"

    @property
    def fastest(self) -> Probe:
        """The batch with the most items per second; beyond it larger ones stop helping."""
        return max((p for p in self.tried if p.fits), key=lambda p: p.items_per_s or 0.0)


class Case(Protocol):
    """What is run at each batch size; in a child process too, so that it has to pickle."""

    def open(self, batch: int, device: str) -> tuple[Callable[[], object], float, str]:
        """A function that makes one step, how many items a step is worth, and what they are called."""
        ...


@dataclass(frozen=True)
class ModelCase:
    build: Callable[[], nn.Module] | nn.Module
    make_inputs: Callable[[int], Inputs]
    loss: LossFunction | None = None
    optimizer: OptimizerFactory | None = None
    # Whether the model is a copy already, as it is in a child process.
    private: bool = False

    def open(self, batch: int, device: str) -> tuple[Callable[[], object], float, str]:
        training = self.loss is not None
        with torch.device(device):
            model = self.build if isinstance(self.build, nn.Module) else self.build()
            inputs = self.make_inputs(batch)
        place = next(model.parameters(), torch.empty(0)).device
        # Steps change weights, and without gradients still batch norm's statistics: never the user's own.
        kept = place == torch.device(device) and not training and not model.training
        if model is self.build and not self.private and not kept:
            model = copy.deepcopy(model)
        if not kept:
            model = model.to(device).train(training)
        run = Job.of(model, loss=self.loss, optimizer=self.optimizer, share=True).finish()
        return (lambda: run(inputs) if training else call(run, inputs)), batch, "sample"


@dataclass(frozen=True)
class WorkloadCase:
    address: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def open(self, batch: int, device: str) -> tuple[Callable[[], object], float, str]:
        workload = load_workload(self.address, {**self.options, "batch": batch})
        model, inputs = workload.fresh_model(device), workload.fresh_inputs(0, device)
        job = Job.of(
            model,
            loss=workload.loss,
            optimizer=workload.optimizer,
            host_inputs=workload.host_inputs,
            share=True,
            master_weights=workload.master_weights,
        )
        run = job.finish()
        # A workload that does not say what a step is worth counts calls; here a call is worth its batch.
        told = (workload.items, workload.unit) != (1.0, "call")
        items, unit = (workload.items, workload.unit) if told else (float(batch), "sample")
        return (lambda: run(inputs) if workload.training else workload.step(run, inputs)), items, unit


def find_optimal_batch_size(
    build_or_model: Callable[[], nn.Module] | nn.Module,
    make_inputs: Callable[[int], Inputs],
    *,
    starting_batch_size: int = 1,
    target_utilization: float = 0.85,
    max_batch: int = 4096,
    training: bool = False,
    loss: LossFunction | None = None,
    optimizer: OptimizerFactory | None = None,
    device: str = "auto",
    memory_bytes: int | None = None,
    probe_limit_s: float = 300.0,
    on_probe: Callable[[Probe], None] | None = None,
) -> BatchSizeResult:
    """The largest batch whose peak stays within `target_utilization` of the device's memory.

    `build_or_model` is a function that builds the model, or a model (left as it is; a training step runs on a
    copy, which counts too on a GPU). `make_inputs(n)` gives a batch of n. On a CPU both must be importable by
    a child process: functions of a module, no lambdas. With `training=True`, give `loss` and `optimizer`.
    """
    if (training or loss is not None or optimizer is not None) and (loss is None or optimizer is None):
        raise RedlineError("the batch size of a training step needs both loss= and optimizer=.")
    in_child = resolve_device(device) == "cpu"
    case = ModelCase(build_or_model, make_inputs, loss, optimizer, private=in_child)
    return search(
        case,
        starting_batch_size,
        target_utilization,
        max_batch,
        device,
        memory_bytes,
        probe_limit_s,
        on_probe,
    )


def search(
    case: Case,
    starting_batch_size: int = 1,
    target_utilization: float = 0.85,
    max_batch: int = 4096,
    device: str = "auto",
    memory_bytes: int | None = None,
    probe_limit_s: float = 300.0,
    on_probe: Callable[[Probe], None] | None = None,
) -> BatchSizeResult:
    """Doubles from the starting batch until one does not fit, then bisects between the last two."""
    if not 0 < target_utilization <= 1:
        raise RedlineError(f"the target utilization is a share between 0 and 1, not {target_utilization}.")
    if not 1 <= starting_batch_size <= max_batch:
        raise RedlineError(f"the starting batch is between 1 and the largest ({max_batch}), not {starting_batch_size}.")
    device = resolve_device(device)
    memory = memory_bytes if memory_bytes is not None else _device_bytes(device)
    budget = int(target_utilization * memory)
    probe = _probe_on_gpu if device != "cpu" else _probe_in_child
    tried: list[Probe] = []
    unit = "sample"

    def fits(batch: int) -> bool:
        nonlocal unit
        answer, unit = probe(case, batch, device, budget, probe_limit_s)
        if answer.fits and answer.peak_bytes is not None and answer.peak_bytes > budget:
            over = f"it takes {format_bytes(answer.peak_bytes)} of {format_bytes(budget)}"
            answer = replace(answer, fits=False, reason=over)
        tried.append(answer)
        if on_probe is not None:
            on_probe(answer)
        return answer.fits

    low, batch = 0, starting_batch_size
    while fits(batch):
        low = batch
        if batch == max_batch:
            return _result(low, budget, tried, "max_batch", unit)
        batch = min(2 * batch, max_batch)
    high = batch
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    if low == 0:
        smallest = min(tried, key=lambda p: p.batch)
        raise RedlineError(f"not even a batch of 1 fits in {format_bytes(budget)}: {smallest.reason}.")
    refused = next(p for p in tried if p.batch == high)
    return _result(low, budget, tried, "time" if "longer than" in refused.reason else "memory", unit)


def _result(batch: int, budget: int, tried: list[Probe], stopped_by: str, unit: str) -> BatchSizeResult:
    peak = next(p.peak_bytes for p in tried if p.batch == batch)
    assert peak is not None
    return BatchSizeResult(batch, peak, budget, tuple(tried), stopped_by, unit)


def _device_bytes(device: str) -> int:
    if device == "cpu":
        return available_host_bytes()
    return torch.cuda.get_device_properties(device).total_memory


def _run(case: Case, batch: int, device: str, before_bytes: int = 0) -> tuple[Probe, str]:
    """A few steps: the peak of all of them, and the median time of those after the first."""
    with MemoryMonitor(device) as monitor:
        step, items, unit = case.open(batch, device)
        times: list[float] = []
        began = time.perf_counter()
        while len(times) < 2 or (len(times) < 20 and time.perf_counter() - began < 1.0):
            start = time.perf_counter()
            step()
            if device != "cpu":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - start)
        peak = monitor.peak_bytes
    seconds = statistics.median(times[1:])
    return Probe(batch, True, max(peak - before_bytes, 0), seconds, items / seconds), unit


def _probe_on_gpu(case: Case, batch: int, device: str, budget: int, limit_s: float) -> tuple[Probe, str]:
    total = torch.cuda.get_device_properties(device).total_memory
    allowed = torch.cuda.get_per_process_memory_fraction(device)
    _clean_gpu()
    torch.cuda.set_per_process_memory_fraction(min(allowed, budget / total), device)
    began = time.perf_counter()
    try:
        answer, unit = _run(case, batch, device)
    except Exception as error:
        answer, unit = _answer_to(error, batch)
    finally:
        torch.cuda.set_per_process_memory_fraction(allowed, device)
    # Only here, past the exception, has everything that its frames held been let go.
    _clean_gpu()
    took = time.perf_counter() - began
    return (_too_slow(answer, limit_s) if took > limit_s else answer), unit


def _clean_gpu() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def _too_slow(answer: Probe, limit_s: float) -> Probe:
    return replace(answer, fits=False, reason=f"it took longer than {format_seconds(limit_s)}")


def _answer_to(error: Exception, batch: int) -> tuple[Probe, str]:
    """Running out of memory is an answer; anything else is raised as one sentence."""
    if is_out_of_memory(error):
        return Probe(batch, False, reason="out of memory"), "sample"
    if isinstance(error, RedlineError):
        raise error
    text = (str(error).strip().splitlines() or ["no message"])[0]
    raise RedlineError(f"a batch of {batch} raised {type(error).__name__}: {text}.") from error


def _probe_in_child(case: Case, batch: int, device: str, budget: int, limit_s: float) -> tuple[Probe, str]:
    try:
        # Plain pickle copies the weights; a Process's own would move the user's tensors to shared memory.
        packed = pickle.dumps(case)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise RedlineError(
            "on the CPU each batch runs in a process of its own, so the model and the functions must be "
            f"importable there (no lambdas): {error}."
        ) from error
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=_child, args=(theirs, packed, batch, budget), daemon=True)
    child.start()
    theirs.close()
    try:
        if not ours.poll(limit_s):
            return _too_slow(Probe(batch, False), limit_s), "sample"
        with suppress(EOFError):
            answer = ours.recv()
            if isinstance(answer, RedlineError):
                raise answer
            return answer
        child.join(10)
        code = child.exitcode
        if code is None or code >= 0:
            raise RedlineError(f"the process of batch {batch} ended with code {code} before it could answer.")
        return Probe(batch, False, reason=f"its process was ended by signal {-code}"), "sample"
    finally:
        child.kill()
        child.join()
        ours.close()


def _child(connection: Connection, packed: bytes, batch: int, budget: int) -> None:
    # If memory does run out, the kernel should end this process and nobody else's.
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    # Threads are started before the limit, which would keep them from getting their stacks.
    torch.ones(1 << 20).mul_(2).sum()
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = used + budget + _ADDRESS_HEADROOM
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard < 0 else min(limit, hard), hard))
    # A process brings its libraries along; what counts is what the model and its batch add.
    before = resident_bytes()
    try:
        answer: Any = _run(pickle.loads(packed), batch, "cpu", before)
    except Exception as error:
        try:
            answer = _answer_to(error, batch)
        except RedlineError as sentence:
            answer = RedlineError(str(sentence))
    connection.send(answer)
    connection.close()

"""Finds the largest batch size that fits in memory: doubles it until it does not fit, and then bisects.

Every batch is really run. On a GPU the caching allocator is limited to the budget, and its out-of-memory error is
caught. On a CPU the kernel kills a process that runs out of memory, so each batch runs in a child process; if the child
is killed or exceeds the time limit, the batch does not fit. Times are recorded too, because the largest batch is not
always the fastest.
"""

import contextlib
import copy
import functools
import gc
import pickle
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import cloudpickle
import torch
from torch import nn

from redline.errors import RedlineError, first_line
from redline.ladder.job import Job
from redline.ladder.measuring.worker_pool import WorkerFailed, WorkerPool
from redline.ladder.workload import Inputs, LossFunction, OptimizerFactory, call
from redline.ladder.workloads.addresses import load_workload
from redline.machine.host_memory import available_host_bytes, resident_bytes
from redline.machine.machine import resolve_device
from redline.machine.memory import MemoryMonitor, is_out_of_memory
from redline.machine.processes import ChildExited
from redline.notation import format_bytes, format_seconds

# Address space that thread stacks and malloc arenas reserve without using it.
_ADDRESS_HEADROOM = 2 * 2**30


@dataclass(frozen=True)
class Probe:
    """The result of one batch size that was tried."""

    batch: int
    fits: bool
    # None if the batch ran out of memory or exceeded the time limit.
    peak_bytes: int | None = None
    seconds: float | None = None
    items_per_s: float | None = None
    # The reason why the batch size does not fit; empty if it fits.
    reason: str = ""


@dataclass(frozen=True)
class BatchSizeResult:
    """The largest batch size that fits, and every batch size that was tried."""

    batch: int
    peak_bytes: int
    budget_bytes: int
    tried: tuple[Probe, ...]
    # The limit that ended the search: "memory", "max_batch" or "time".
    stopped_by: str
    unit: str = "sample"

    @property
    def fastest(self) -> Probe:
        """The batch size with the most items per second."""
        return max((p for p in self.tried if p.fits), key=lambda p: p.items_per_s or 0.0)


class Case(Protocol):
    """The model and the step to run at each batch size. Pickled with cloudpickle to run in a child process."""

    def open(self, batch: int, device: str) -> tuple[Callable[[], object], float, str]:
        """Returns a function that runs one step, the number of items in a step, and the name of an item."""
        ...


@dataclass(frozen=True)
class ModelCase:
    build: Callable[[], nn.Module] | nn.Module
    make_inputs: Callable[[int], Inputs]
    loss: LossFunction | None = None
    optimizer: OptimizerFactory | None = None
    # True if the model is already a copy, as in a child process.
    private: bool = False

    def open(self, batch: int, device: str) -> tuple[Callable[[], object], float, str]:
        training = self.loss is not None
        with torch.device(device):
            model = self.build if isinstance(self.build, nn.Module) else self.build()
            inputs = self.make_inputs(batch)
        model_device = next(model.parameters(), torch.empty(0)).device
        # Runs a copy, because training steps change weights, and training mode updates batch norm statistics.
        usable = model_device == torch.device(device) and not training and not model.training
        if model is self.build and not self.private and not usable:
            model = copy.deepcopy(model)
        if not usable:
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
        run = Job.of_workload(workload, model).finish()
        # If the workload does not set `items`, a step counts as `batch` samples.
        counts_items = (workload.items, workload.unit) != (1.0, "call")
        items, unit = (workload.items, workload.unit) if counts_items else (float(batch), "sample")
        return (lambda: run(inputs) if workload.training else workload.step(run, inputs)), items, unit


def find_optimal_batch_size(
    model: Callable[[], nn.Module] | nn.Module | str,
    make_inputs: Callable[[int], Inputs] | None = None,
    *,
    options: Mapping[str, Any] | None = None,
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
    """Returns the largest batch size whose peak memory stays within `target_utilization` of the device's memory.

    Args:
        model: A function that builds the model, a model, or the address of a workload with an option `batch`. A model
            is not changed: a training step runs on a copy, which takes GPU memory too.
        make_inputs: Returns a batch of n samples for a number n. Not for a workload, which makes its own inputs.
        options: The other options of the workload's function, such as `{"size": 224}`.
        starting_batch_size: The first batch size to try.
        target_utilization: The largest share of the memory to use.
        max_batch: The largest batch size to try.
        training: Whether to run training steps, with `loss` and `optimizer`. Not for a workload, which has its own.
        loss: The loss of a model's output and its batch.
        optimizer: Returns the optimizer of the model's parameters.
        device: `"cpu"`, `"cuda"`, `"cuda:1"`; `"auto"` uses a GPU if there is one.
        memory_bytes: The size of the device's memory that the search assumes; by default its real size.
        probe_limit_s: The time limit of each batch size.
        on_probe: Called with the result of each batch size.

    On a CPU each batch runs in a child process, so the model and the functions must be picklable with cloudpickle
    (lambdas and functions of `__main__` are).
    """
    if isinstance(model, str):
        if make_inputs is not None or training or loss is not None or optimizer is not None:
            raise RedlineError("make_inputs=, training=, loss= and optimizer= are for a model; a workload has its own.")
        options = dict(options or {})
        if "batch" in options:
            raise RedlineError(
                "the search sets the option batch: leave it out, and use --start and --max-batch (in Python, "
                "starting_batch_size= and max_batch=)."
            )
        # Raises if the workload has no option `batch`, before a process is started.
        load_workload(model, {**options, "batch": starting_batch_size})
        case: Case = WorkloadCase(model, options)
    else:
        case = _model_case(model, make_inputs, options, training, loss, optimizer, device)
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


def _model_case(
    model: Callable[[], nn.Module] | nn.Module,
    make_inputs: Callable[[int], Inputs] | None,
    options: Mapping[str, Any] | None,
    training: bool,
    loss: LossFunction | None,
    optimizer: OptimizerFactory | None,
    device: str,
) -> ModelCase:
    if make_inputs is None or options:
        raise RedlineError("a model needs make_inputs=, and has no options=, which are for the address of a workload.")
    if (training or loss is not None or optimizer is not None) and (loss is None or optimizer is None):
        raise RedlineError("the batch size of a training step needs both loss= and optimizer=.")
    return ModelCase(model, make_inputs, loss, optimizer, private=resolve_device(device) == "cpu")


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
    """Doubles the starting batch size until it does not fit, then bisects between the last two sizes tried."""
    if not 0 < target_utilization <= 1:
        raise RedlineError(f"target_utilization must be above 0 and at most 1, not {target_utilization}.")
    if not 1 <= starting_batch_size <= max_batch:
        raise RedlineError(f"starting_batch_size must be from 1 to max_batch ({max_batch}), not {starting_batch_size}.")
    device = resolve_device(device)
    memory = memory_bytes if memory_bytes is not None else _device_bytes(device)
    budget = int(target_utilization * memory)
    tried: list[Probe] = []
    unit = "sample"

    with contextlib.ExitStack() as stack:

        @functools.cache
        def pool() -> WorkerPool:
            return stack.enter_context(WorkerPool())

        def fits(batch: int) -> bool:
            nonlocal unit
            if device == "cpu":
                probe, unit = _probe_in_child(case, batch, budget, probe_limit_s, pool)
            else:
                probe, unit = _probe_on_gpu(case, batch, device, budget, probe_limit_s)
            if probe.fits and probe.peak_bytes is not None and probe.peak_bytes > budget:
                over = f"it needs {format_bytes(probe.peak_bytes)}, and the limit is {format_bytes(budget)}"
                probe = replace(probe, fits=False, reason=over)
            tried.append(probe)
            if on_probe is not None:
                on_probe(probe)
            return probe.fits

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
    """Runs a few steps; returns their peak memory, and the median time of all but the first.

    Raises MemoryError if memory runs out, and RedlineError for any other error.
    """
    try:
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
    except Exception as error:
        if is_out_of_memory(error):
            raise MemoryError("out of memory") from error
        if isinstance(error, RedlineError):
            raise
        raise RedlineError(f"a batch of {batch} raised {type(error).__name__}: {first_line(error)}.") from error
    seconds = statistics.median(times[1:])
    return Probe(batch, True, max(peak - before_bytes, 0), seconds, items / seconds), unit


def _too_slow(probe: Probe, limit_s: float) -> Probe:
    return replace(probe, fits=False, reason=f"it took longer than {format_seconds(limit_s)}")


def _out_of_memory(batch: int) -> Probe:
    return Probe(batch, False, reason="out of memory")


def _probe_on_gpu(case: Case, batch: int, device: str, budget: int, limit_s: float) -> tuple[Probe, str]:
    total = torch.cuda.get_device_properties(device).total_memory
    allowed = torch.cuda.get_per_process_memory_fraction(device)
    _clean_gpu()
    torch.cuda.set_per_process_memory_fraction(min(allowed, budget / total), device)
    began = time.perf_counter()
    try:
        probe, unit = _run(case, batch, device)
    except MemoryError:
        probe, unit = _out_of_memory(batch), "sample"
    finally:
        torch.cuda.set_per_process_memory_fraction(allowed, device)
    # The exception's stack frames hold tensors; they are released only here, after the except block.
    _clean_gpu()
    return (_too_slow(probe, limit_s) if time.perf_counter() - began > limit_s else probe), unit


def _clean_gpu() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def _probe_in_child(
    case: Case, batch: int, budget: int, limit_s: float, pool: Callable[[], WorkerPool]
) -> tuple[Probe, str]:
    try:
        # Pickled here, because sending a tensor through a connection would move the user's tensor to shared memory.
        function = cloudpickle.dumps(functools.partial(_run_within_limit, case, batch, budget))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise RedlineError(
            f"on a CPU each batch runs in a child process, but the model or a function cannot be pickled: {error}."
        ) from error
    worker = pool().start()
    try:
        return worker.ask("call", limit_s, function=function, path=sys.path)
    except WorkerFailed as failure:
        if failure.kind == "timeout":
            return _too_slow(Probe(batch, False), limit_s), "sample"
        if failure.kind == "oom":
            return _out_of_memory(batch), "sample"
        exited = failure.__cause__
        if isinstance(exited, ChildExited) and exited.code is not None and exited.code < 0:
            return Probe(batch, False, reason=str(failure)), "sample"
        raise RedlineError(f"{failure}.") from failure
    finally:
        worker.stop()


def _run_within_limit(case: Case, batch: int, budget: int) -> tuple[Probe, str]:
    """Limits the address space of the current process, a child process, and runs one batch size in it."""
    # If the machine runs out of memory, the kernel should kill this process and no other.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    # Starts the thread pool before the limit is set, because the limit may leave no room for the stacks of its threads.
    torch.ones(1 << 20).mul_(2).sum()
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = used + budget + _ADDRESS_HEADROOM
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard < 0 else min(limit, hard), hard))
    # Subtracts the resident memory so far (of the libraries), so that only the model and its batch count.
    return _run(case, batch, "cpu", resident_bytes())

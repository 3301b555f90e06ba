"""Runs the untouched model, to get the reference outputs for judging plans and the facts about its workload."""

import hashlib
import inspect
import sys
import sysconfig
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from redline.errors import WorkloadError
from redline.ladder.gate import Gate, gates_for, values_of
from redline.ladder.job import Job
from redline.ladder.measuring.flops import OperationCounter, counting_flops
from redline.ladder.measuring.judge import (
    TRAINING_STEPS,
    as_dtype,
    check_reference,
    check_same_model,
    check_state,
    detached,
    losses_and_gradients,
)
from redline.ladder.workload import Inputs, Workload, call
from redline.ladder.workloads.addresses import find_function, load_workload


def run_reference(
    address: str,
    shapes: Mapping[str, Mapping[str, Any]],
    device: str,
    paths: Mapping[tuple[int, ...], str],
    dtype: str,
    threads: int = 0,
    max_error: float = 0.0,
) -> dict[str, Any]:
    """Runs the untouched model in strict fp32 or fp64, and checks and saves its outputs for each set of seeds.

    `threads` limits the CPU threads, because on a busy machine many threads wait long for each other. `max_error`
    lowers the limit of the first error gate. Returns facts about the workload, such as its FLOPs and its digest.
    """
    if threads:
        torch.set_num_threads(min(threads, torch.get_num_threads()))
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    known, running = set(sys.modules), _count_threads()
    workloads = {label: load_workload(address, options) for label, options in shapes.items()}
    started_threads = _count_threads() > running or torch.cuda.is_initialized()
    first = next(iter(workloads.values()))
    check_same_model(workloads, device)
    # FLOPs are counted on a separate model, because a model may change with every call.
    flops, operations = _check_and_count(workloads, device, next(iter(paths)), dtype)
    state = ""
    for index, (seeds, path) in enumerate(paths.items()):
        job = _reference_job(first, device, dtype)
        run = job.finish()
        if index == 0 and not first.training:
            batches = [as_dtype(first.fresh_inputs(seed, device), dtype) for seed in seeds[:2]]
            state = check_state(first, job.model, run, batches)
        outputs = _outputs(workloads, run, device, seeds, dtype)
        if max_error:
            _check_error_gate(first, next(iter(outputs.values())))
        torch.save({label: [values_of(o) for o in results] for label, results in outputs.items()}, path)
    return {
        "digest": _digest(address, first.with_max_error(max_error).gates, dtype, flops),
        "flops": flops,
        "operations": operations,
        "training": first.training,
        "state": state,
        "name": first.label,
        "unit": first.unit,
        "items": {label: w.items for label, w in workloads.items()},
        "modules": [] if started_threads else _installed(name for name in sys.modules if name not in known),
    }


def _check_error_gate(workload: Workload, outputs: Sequence[Any]) -> None:
    """Raises WorkloadError if no gate of the workload measures an error, so that `max_error` has no limit to lower."""
    gates = gates_for(workload.gates, outputs)
    if not any(gate.direction == "lower" for gate in gates):
        names = " and ".join(gate.metric for gate in gates)
        raise WorkloadError(
            f"{workload.label}: --max-error limits a metric of which lower values are better, but the output is judged "
            f"by {names}: give the workload a gate such as Gate('relative_error', 0.02), or leave the option out"
        )


def _count_threads() -> int:
    with suppress(OSError):
        return len(list(Path("/proc/self/task").iterdir()))
    return 0


def _installed(modules: Iterable[str]) -> list[str]:
    """Returns the modules from installed packages, which can be imported early, unlike the user's own modules."""
    folders = tuple({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    specs = [(name, getattr(sys.modules[name], "__spec__", None)) for name in modules]
    return [name for name, spec in specs if spec and spec.name == name and (spec.origin or "").startswith(folders)]


def _check_and_count(
    workloads: Mapping[str, Workload], device: str, seeds: Sequence[int], dtype: str
) -> tuple[dict[str, float], int]:
    """Returns the FLOPs of a step by shape, and the number of operators that one step runs.

    Raises WorkloadError if a training model ignores its input.
    """
    job = _reference_job(next(iter(workloads.values())), device, dtype)
    run, flops, operations = job.finish(), {}, 0
    for label, workload in workloads.items():
        batches = [as_dtype(workload.fresh_inputs(seed, device), dtype) for seed in seeds[:2]]
        if workload.training:
            with torch.no_grad():
                check_reference(workload, seeds[:2], [call(job.model, batch) for batch in batches])
            flops[label], operations = _count(lambda b=batches[0]: _forward_backward(job, b))
        else:
            flops[label], operations = _count(lambda w=workload, b=batches[0]: w.step(run, b))
    return flops, operations


def _outputs(
    workloads: Mapping[str, Workload], run: Callable[..., Any], device: str, seeds: Sequence[int], dtype: str
) -> dict[str, list[Any]]:
    """Returns the checked outputs by shape; for training, the losses and gradients of the first shape."""
    outputs: dict[str, list[Any]] = {}
    for label, workload in workloads.items():
        batches = [as_dtype(workload.fresh_inputs(seed, device), dtype) for seed in seeds]
        if workload.training:
            return {label: [losses_and_gradients(run, batches[:TRAINING_STEPS])]}
        results = [workload.step(run, batch) for batch in batches]
        check_reference(workload, seeds, results)
        outputs[label] = [as_dtype(detached(result), "fp32") for result in results]
    return outputs


def _reference_job(workload: Workload, device: str, dtype: str) -> Job:
    """Creates the job of the untouched model in fp32 or fp64, even if the workload builds a half-precision model."""
    job = Job.of_workload(workload, workload.fresh_model(device))
    job.model.double() if dtype == "fp64" else job.model.float()
    return job


def _forward_backward(job: Job, batch: Inputs) -> None:
    assert job.loss is not None
    job.loss(call(job.model, batch), batch).backward()
    job.model.zero_grad(set_to_none=True)


def _count(run: Callable[[], object]) -> tuple[float, int]:
    """Returns the FLOPs and the number of operations."""
    with counting_flops() as counter, OperationCounter() as operations:
        run()
    return float(counter.get_total_flops()), operations.count


def _digest(address: str, gates: Sequence[Gate], dtype: str, flops: Mapping[str, float]) -> str:
    """Returns a digest of the workload's source file, gates and FLOPs, and of the reference dtype."""
    source = inspect.getsourcefile(find_function(address))
    parts = (Path(source).read_bytes() if source else b"", dtype, sorted(flops.items()))
    limits = [(gate.metric, gate.limit, gate.direction) for gate in gates]
    return hashlib.sha256(repr((parts, limits)).encode()).hexdigest()[:12]

"""Prepares a run: detects the machine, and runs the untouched model for the reference outputs of all trials."""

import hashlib
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redline.errors import RedlineError, WorkloadError
from redline.ladder.measuring.trial import FRESH_SEEDS, JUDGE_SEEDS, TrialSpec
from redline.ladder.measuring.worker_pool import WorkerFailed, WorkerPool
from redline.ladder.objective import Objective
from redline.ladder.search.settings import Settings
from redline.ladder.search.source_digest import digest_sources
from redline.ladder.workload import Workload
from redline.ladder.workloads.pickled import is_pickled, save_workload
from redline.machine.machine import Ceilings, Machine


@dataclass(frozen=True)
class WorkloadFacts:
    """Facts about a workload from its reference run; `items` and `flops` are per step, by input shape."""

    name: str
    training: bool
    unit: str
    items: Mapping[str, float]
    flops: Mapping[str, float]
    # The number of operations in a step, from which the time of a compilation is estimated.
    operations: int
    # A digest of the workload's sources, its gates, its FLOPs and the precision of the reference.
    digest: str
    # A digest per source file, to tell which one has changed.
    sources: Mapping[str, str]
    # A sentence on the state that the model keeps between calls; empty if it keeps none.
    state: str = ""


def address_of(workload: str | Workload, pool: WorkerPool) -> str:
    """Returns the address by which the trial processes load the workload, such as `file.py:function`.

    If `workload` is an object and not an address, saves the object in the pool's folder.
    """
    if isinstance(workload, str):
        return workload
    return save_workload(workload, Path(tempfile.mkdtemp(prefix="workload-", dir=pool.scratch)))


def ask_machine(pool: WorkerPool, device: str = "auto", measure: bool = True, again: bool = False) -> Machine:
    """Detects the machine in a worker, so that this process does not initialize CUDA.

    With `measure`, the worker also measures the ceilings: the highest memory bandwidth and FLOP/s of the device.
    """
    worker = pool.start()
    try:
        answer = worker.ask("machine", 300, device=device, measure=measure, again=again)
    except WorkerFailed as failure:
        raise RedlineError(f"{failure}.") from failure
    finally:
        worker.stop()
    return machine_from_dict(answer)


def machine_from_dict(data: Mapping[str, Any]) -> Machine:
    values = {key: value for key, value in data.items() if key != "fingerprint"}
    for key in ("features", "hardware_dtypes", "attention_kernels", "capability"):
        values[key] = tuple(values[key])
    if values["ceilings"] is not None:
        values["ceilings"] = Ceilings(**values["ceilings"])
    return Machine(**values)


def prepare_trials(
    pool: WorkerPool, settings: Settings, machine: Machine, threads: int = 0
) -> tuple[TrialSpec, WorkloadFacts]:
    """Runs the untouched model on every judging seed; returns the settings of all trials and the workload's facts.

    `threads` limits the CPU threads of these runs.
    """
    references, facts = _run_references(pool, settings, machine.device, threads)
    is_requests = settings.objective is Objective.REQUESTS
    if is_requests and facts.training:
        raise WorkloadError(
            f"{facts.name}: the objective requests counts concurrent calls of a model, but this workload runs training "
            "steps: choose throughput."
        )
    spec = TrialSpec(
        settings.workload,
        settings.shapes,
        machine.device,
        references,
        settings.objective,
        settings.timeout_s,
        settings.sampling_s,
        callers=settings.callers if is_requests else 0,
        max_bytes=settings.max_bytes,
        max_error=settings.max_error,
        name=facts.name if is_pickled(settings.workload) else settings.workload,
    )
    return spec, facts


def _run_references(
    pool: WorkerPool, settings: Settings, device: str, threads: int
) -> tuple[dict[tuple[int, ...], str], WorkloadFacts]:
    """Returns the file of reference outputs for each set of seeds, and the workload's facts."""
    number = len(list(pool.scratch.iterdir()))
    references: dict[tuple[int, ...], str] = {}
    for seeds in (JUDGE_SEEDS, FRESH_SEEDS):
        references[seeds] = str(pool.scratch / f"reference-{number}-{seeds[0]}.pt")
    worker = pool.start()
    try:
        answer = worker.ask(
            "reference",
            2 * settings.timeout_s,
            address=settings.workload,
            shapes=settings.shapes,
            device=device,
            paths=references,
            dtype=settings.reference,
            threads=threads,
            max_error=settings.max_error,
        )
    except WorkerFailed as failure:
        subject = "" if is_pickled(settings.workload) else f"{settings.workload}: "
        prefix = "" if failure.kind == "workload" else f"{subject}the untouched model failed: "
        raise WorkloadError(f"{prefix}{failure}.") from failure
    finally:
        worker.stop()
    pool.import_early(answer.pop("modules"))
    sources = digest_sources(settings.workload)
    parts = repr((answer.pop("digest"), sorted(sources.items())))
    return references, WorkloadFacts(**answer, digest=hashlib.sha256(parts.encode()).hexdigest()[:12], sources=sources)

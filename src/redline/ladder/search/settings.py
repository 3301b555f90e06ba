"""What a climb, a verification and a benchmark have in common: their settings, the machine, and the references."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from redline.errors import RedlineError, WorkloadError
from redline.ladder.measuring.trial import FRESH_SEEDS, JUDGE_SEEDS, TrialSpec
from redline.ladder.measuring.worker_pool import WorkerFailed, WorkerPool
from redline.ladder.objective import Objective
from redline.ladder.plan import parse_rung
from redline.ladder.search.source_digest import digest_sources
from redline.ladder.search.target import Target
from redline.machine.machine import Ceilings, Machine


@dataclass(frozen=True)
class Settings:
    """What a climb is asked to do."""

    workload: str
    folder: Path
    shapes: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"": {}})
    device: str = "auto"
    objective: str = "latency"
    target_s: float | None = None
    target_bytes: int | None = None
    budget_s: float | None = None
    only: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    reference: str = "fp32"
    timeout_s: float = 300.0
    sampling_s: float = 6.0
    ablate: bool = True
    resume: bool = False

    def __post_init__(self) -> None:
        Objective.named(self.objective)
        if self.reference not in ("fp32", "fp64"):
            raise RedlineError(f"the reference is fp32 or fp64, not {self.reference!r}.")
        for text in (*self.only, *self.without):
            parse_rung(text)
        if both := sorted({*self.only} & {*self.without}):
            raise RedlineError(f"{both[0]} is both to be tried and to be left out: take it from one of the two.")

    @property
    def target(self) -> Target | None:
        asked = Target(self.target_s, self.target_bytes)
        return asked if asked != Target() else None

    @property
    def measurements_path(self) -> Path:
        return self.folder / "measurements.jsonl"


def ask_machine(pool: WorkerPool, device: str = "auto", measure: bool = True, again: bool = False) -> Machine:
    """The machine, read in a worker so that this process never starts CUDA."""
    worker = pool.start()
    try:
        seen = worker.ask("machine", 300, device=device, measure=measure, again=again)
    except WorkerFailed as failure:
        raise RedlineError(f"{failure}.") from failure
    finally:
        worker.stop()
    return machine_from_dict(seen)


def machine_from_dict(data: Mapping[str, Any]) -> Machine:
    values = {key: value for key, value in data.items() if key != "fingerprint"}
    for key in ("features", "hardware_dtypes", "attention_kernels", "capability"):
        values[key] = tuple(values[key])
    if values["ceilings"] is not None:
        values["ceilings"] = Ceilings(**values["ceilings"])
    return Machine(**values)


def make_references(
    pool: WorkerPool, settings: Settings, device: str
) -> tuple[dict[tuple[int, ...], str], dict[str, Any]]:
    """Runs the untouched model on every judging seed; gives the files and what is known of the workload."""
    references, facts = {}, {}
    for seeds in (JUDGE_SEEDS, FRESH_SEEDS):
        path = str(pool.scratch / f"reference-{len(list(pool.scratch.iterdir()))}-{seeds[0]}.pt")
        worker = pool.start()
        try:
            facts = worker.ask(
                "reference",
                settings.timeout_s,
                address=settings.workload,
                shapes=settings.shapes,
                device=device,
                seeds=seeds,
                path=path,
                dtype=settings.reference,
            )
        except WorkerFailed as failure:
            prefix = "" if failure.kind == "workload" else f"{settings.workload}: the untouched model failed: "
            raise WorkloadError(f"{prefix}{failure}.") from failure
        finally:
            worker.stop()
        references[seeds] = path
    return references, facts


def prepare_trials(pool: WorkerPool, settings: Settings, machine: Machine) -> tuple[TrialSpec, dict[str, Any]]:
    """Runs the untouched model for reference; gives the spec that all arms share, and the workload's facts."""
    references, facts = make_references(pool, settings, machine.device)
    facts["sources"] = digest_sources(settings.workload)
    parts = repr((facts["digest"], sorted(facts["sources"].items())))
    facts["digest"] = hashlib.sha256(parts.encode()).hexdigest()[:12]
    spec = TrialSpec(
        settings.workload,
        settings.shapes,
        machine.device,
        references,
        Objective.named(settings.objective),
        settings.timeout_s,
        settings.sampling_s,
    )
    return spec, facts

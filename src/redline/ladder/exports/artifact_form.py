"""The base class of the forms of an artifact, which define how it is written, given its manifest, and loaded."""

import tomllib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from redline.errors import PlanError
from redline.ladder.exports.manifest import Manifest
from redline.ladder.job import Job
from redline.ladder.plan import Plan, Unavailable
from redline.ladder.workload import Inputs, Workload
from redline.machine.machine import Machine

# Rungs that act around each call and do not change the model, so they are applied again when an artifact is loaded.
CALL_RUNGS = ("tf32", "cudnn_benchmark", "keep_memory", "threads", "cuda_graph")


@dataclass(frozen=True)
class Source:
    """What is exported: a workload with its untouched model, the batches for calibration (`samples`), and the plan."""

    workload: Workload
    model: nn.Module
    samples: tuple[Inputs, ...]
    plan: Plan
    machine: Machine

    @property
    def device(self) -> torch.device:
        return torch.device(self.machine.device)

    def build(self, plan: Plan) -> tuple[Plan, Job]:
        """Applies a plan to `model`, which is not copied; returns the plan with resolved choices, and the job."""
        return plan.build(Job.of_workload(self.workload, self.model, self.samples), self.machine)


@dataclass(frozen=True)
class Written:
    """What a form wrote: the resolved plan, and the facts for the manifest that only the form knows.

    `session` holds the options of an ONNX Runtime session. `traced` is the reason why a folder with `compile` has to
    trace its model again when it is loaded; it is empty if the folder need not.
    """

    plan: Plan
    inputs: Mapping[str, Any]
    outputs: Mapping[str, Any]
    session: Mapping[str, Any] | None = None
    traced: str = ""


class ArtifactForm(ABC):
    name: ClassVar[str]  # in the manifest
    title: ClassVar[str]  # in messages, such as "an ONNX file"
    short: ClassVar[str]  # in hints, such as "an ONNX file (.onnx)"
    suffix: ClassVar[str]
    # The inference rungs that this form cannot hold.
    refused: ClassVar[frozenset[str]] = frozenset()
    # Whether the artifact contains machine code.
    compiled: ClassVar[bool] = False

    def why_not(self, plan: Plan, machine: Machine) -> str:
        """Returns why this form cannot hold the plan, apart from the rungs in `refused`; empty if it can."""
        return ""

    @abstractmethod
    def write(self, source: Source, path: Path, progress: Callable[[str], None]) -> Written:
        """Writes the artifact without its manifest to `path`, a new file or folder with the form's suffix."""

    @abstractmethod
    def seal(self, path: Path, manifest: Manifest, target: Path) -> None:
        """Writes the complete artifact to `target`: what `write` wrote to `path`, with the manifest added.

        For a folder, `target` is the same as `path`.
        """

    @abstractmethod
    def digests(self, path: Path) -> dict[str, str]:
        """Returns the SHA-256 of each part of what `write` wrote."""

    @abstractmethod
    def read(self, path: Path) -> Manifest | None:
        """Returns the manifest, or None if there is none. Raises ModelError if a file differs from its digest."""

    @abstractmethod
    def load(self, path: Path, manifest: Manifest, machine: Machine) -> Job:
        """Loads the artifact; calling `finish()` on the returned job gives the model."""


def with_call_rungs(job: Job, plan: Plan, machine: Machine) -> Job:
    """Applies the rungs of `CALL_RUNGS` in the plan to a loaded model. Raises `Unavailable` as `Plan.build` does."""
    for rung in plan.rungs:
        if rung.name in CALL_RUNGS:
            # `why_not` gets no job, because `threads` would refuse a job whose number of threads is set already.
            if reason := rung.why_not(machine):
                raise Unavailable(rung, reason)
            job = rung.apply(job)
    return job


def loaded_job(model: nn.Module, manifest: Manifest, machine: Machine) -> Job:
    """Returns the job of a loaded package or ONNX graph, with the rungs of `CALL_RUNGS` in the plan applied."""
    plan = plan_of(manifest)
    return with_call_rungs(replace(Job.of(model, share=True), host_inputs=manifest.host_inputs), plan, machine)


def plan_of(manifest: Manifest) -> Plan:
    return Plan.from_document(tomllib.loads(manifest.plan), "the plan in the manifest")


def check_rungs(form: ArtifactForm, forms: Mapping[str, ArtifactForm], plan: Plan, machine: Machine) -> None:
    """Raises PlanError for a rung that the form cannot hold, and names the forms that can."""
    for rung in plan.rungs:
        if rung.name in form.refused:
            fit = [other.short for other in forms.values() if rung.name not in other.refused]
            able = f"export to {' or '.join(fit)}, or " if fit else ""
            raise PlanError(f"{form.title} cannot hold the rung {rung.name}: {able}leave it out of the plan.")
    if reason := form.why_not(plan, machine):
        raise PlanError(f"{form.title} cannot hold this plan: {reason}.")

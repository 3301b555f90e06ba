"""Optimizes a model in memory: runs a climb, applies the plan that it found, and returns the optimized model."""

import copy
import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypedDict, Unpack, overload

import torch
from torch import nn

from redline.errors import RedlineError, WorkloadError
from redline.ladder.gate import Gate
from redline.ladder.job import Applied, Job, TrainingStep
from redline.ladder.measurement import Measurement
from redline.ladder.plan import Plan, read_plan
from redline.ladder.rewrites.output_check import OutputCheck
from redline.ladder.rewrites.sample_run import on_device
from redline.ladder.rung import Rung
from redline.ladder.search.climb import climb
from redline.ladder.search.climbed import Climbed
from redline.ladder.search.progress import Progress, print_progress
from redline.ladder.workload import SAMPLE_SEEDS, Inputs, LossFunction, OptimizerFactory, Workload, call
from redline.ladder.workloads.pickled import save_model
from redline.ladder.workloads.samples import SampleInputs
from redline.machine.machine import Machine, resolve_device


class _Optimized:
    """The plan of an optimized model, and the climb that found it."""

    def __init__(self, job: Job, plan: Plan, climbed: Climbed | None) -> None:
        super().__init__(job)  # pyrefly: ignore[bad-argument-count]
        self.plan, self.climbed = plan, climbed

    @property
    def measurements(self) -> tuple[Measurement, ...]:
        """Every measurement of the climb; empty if the plan was given."""
        return self.climbed.measurements if self.climbed is not None else ()

    def report(self, path: str | os.PathLike[str]) -> Path:
        """Writes the report of the climb: Markdown if the name ends with .md, otherwise one HTML page."""
        if self.climbed is None:
            raise RedlineError("there is no report, because the plan was given and nothing was measured: omit plan=.")
        return self.climbed.report(path)

    def _repr_html_(self) -> str | None:
        return self.climbed._repr_html_() if self.climbed is not None else None


class OptimizedModel(_Optimized, Applied):
    """The optimized copy of a model: called like the model, without gradients. Shows the ladder in a notebook."""


class OptimizedStep(_Optimized, TrainingStep):
    """An optimized training step: `loss = step(batch)` runs forward, backward and the optimizer on a copy (`model`)."""


class ClimbOptions(TypedDict, total=False):
    """Further options of `redline.climb` that `redline.optimize` accepts."""

    objective: str
    callers: int
    max_memory: str | int | None
    max_error: float | None
    target: str | None
    rungs: Sequence[Rung | str]
    without: Sequence[Rung | str]
    reference: str
    timeout: str | float
    sampling: str | float
    ablation: bool
    out: str | os.PathLike[str] | None


@overload
def optimize(
    model: nn.Module,
    samples: Inputs | list[Inputs],
    *,
    budget: str | float | None = "5m",
    plan: Plan | str | os.PathLike[str] | None = None,
    gates: Gate | tuple[Gate, ...] = (),
    device: str | None = None,
    progress: Progress | None = print_progress,
    **options: Unpack[ClimbOptions],
) -> OptimizedModel: ...


@overload
def optimize(
    model: nn.Module,
    samples: Inputs | list[Inputs],
    *,
    loss: LossFunction,
    optimizer: OptimizerFactory,
    budget: str | float | None = "5m",
    plan: Plan | str | os.PathLike[str] | None = None,
    gates: Gate | tuple[Gate, ...] = (),
    device: str | None = None,
    progress: Progress | None = print_progress,
    **options: Unpack[ClimbOptions],
) -> OptimizedStep: ...


def optimize(
    model: nn.Module,
    samples: Inputs | list[Inputs],
    *,
    loss: LossFunction | None = None,
    optimizer: OptimizerFactory | None = None,
    budget: str | float | None = "5m",
    plan: Plan | str | os.PathLike[str] | None = None,
    gates: Gate | tuple[Gate, ...] = (),
    device: str | None = None,
    progress: Progress | None = print_progress,
    **options: Unpack[ClimbOptions],
) -> OptimizedModel | OptimizedStep:
    """Returns an optimized copy of `model`; the model itself is never changed.

    Trials run in child processes, which get the model and the samples from files. The model's class may be defined in
    a notebook or in a script's `__main__`; the script is not run again.

    Args:
        model: Any `torch.nn.Module`.
        samples: A batch as it is passed to the model (a tensor, a tuple of positional arguments, or a dict of keyword
            arguments), or a list of several batches. Plans are judged on these batches and on random variations of
            them, so they should resemble the inputs that the model will get.
        loss: For a training step: a function of the model's output and the batch.
        optimizer: For a training step: a function that makes an optimizer from parameters.
        budget: Time for the climb, such as `"5m"` or a number of seconds; None for no limit.
        plan: A `Plan`, a plan in one line, or a plan file to apply instead of climbing.
        gates: Limits on the output's error; by default those of the kind of workload.
        device: Where to run the copy; by default where the model is.
        progress: Called with each event's text and, for a measurement, with the measurement. By default a line per
            trial is printed to stderr; None prints nothing.
        options: `objective`, `callers`, `max_memory`, `max_error`, `target`, `rungs`, `without`, `reference`,
            `timeout`, `sampling`, `ablation` and `out`, as in `redline.climb`.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8)).eval()
        >>> batch = torch.rand(2, 3, 32, 32)
        >>> fast = redline.optimize(model, samples=batch, plan="fold_batchnorm")  # without plan= it climbs
        >>> print(fast.plan)
        fold_batchnorm
        >>> fast(batch).shape
        torch.Size([2, 8, 30, 30])
    """
    if not isinstance(model, nn.Module):
        raise WorkloadError(f"optimize() takes a torch.nn.Module, not {type(model).__name__}.")
    if (loss is None) != (optimizer is None):
        raise WorkloadError("a training step needs both loss= and optimizer=: give both, or neither.")
    batches = samples if isinstance(samples, list) else [samples]
    gates = (gates,) if isinstance(gates, Gate) else tuple(gates)
    home = resolve_device(device or str(Job.of(model, share=True).device))
    if plan is not None:
        if options:
            raise RedlineError(f"{next(iter(options))}= is for a climb, but plan= skips it: leave one of them out.")
        calibration = [on_device(batch, torch.device(home)) for batch in batches]
        return _apply(read_plan(plan), None, model, calibration, gates, loss, optimizer, home)
    with tempfile.TemporaryDirectory(prefix="redline-model-") as folder:
        workload = Workload(
            build=save_model(model, Path(folder, "model.pt")),
            inputs=SampleInputs(batches),
            gates=gates,
            loss=loss,
            optimizer=optimizer,
            name=type(model).__name__,
        )
        climbed = climb(workload, budget=budget, device=home, progress=progress, **options)
    with torch.random.fork_rng(devices=[home] if home.startswith("cuda") else []):
        # The batches on which the trials calibrated the plan.
        calibration = [workload.fresh_inputs(seed, home) for seed in SAMPLE_SEEDS]
    return _apply(climbed.plan, climbed, model, calibration, gates, loss, optimizer, home)


def _apply(
    plan: Plan,
    climbed: Climbed | None,
    model: nn.Module,
    batches: Sequence[Inputs],
    gates: tuple[Gate, ...],
    loss: LossFunction | None,
    optimizer: OptimizerFactory | None,
    device: str,
) -> OptimizedModel | OptimizedStep:
    own = copy.deepcopy(model).to(device).train(loss is not None)
    job = Job.of(own, tuple(batches), gates, loss, optimizer, share=True)
    # After a climb no check is needed, because its trials have compared the outputs.
    compare = OutputCheck(job) if climbed is None and not job.training else None
    resolved, job = plan.build(job, Machine.detect(device))
    plan = replace(resolved, objective=plan.objective)
    if job.training:
        return OptimizedStep(job, plan, climbed)
    fast = OptimizedModel(job, plan, climbed)
    if compare is not None:
        compare(fast, job, str(plan))
    else:
        call(fast, batches[0])  # compiles now instead of at the user's first call
    return fast

"""Exports a workload's model with a plan applied, as an artifact that loads in seconds without a search.

The artifact is loaded in a new process before it is put in place: its outputs must pass the workload's gates, and the
time until its first output goes into the manifest.
"""

import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from redline.errors import ModelError, PlanError, RedlineError, Refused
from redline.files.atomic import CannotWrite, check_can_write
from redline.files.partial import hidden_path, remove_abandoned
from redline.ladder.exports.artifact_form import ArtifactForm, Source, check_rungs
from redline.ladder.exports.folder import Folder
from redline.ladder.exports.forms import FORMS, form_for
from redline.ladder.exports.fresh_process import LoadFailed, fresh_process
from redline.ladder.exports.manifest import (
    Manifest,
    machine_facts,
    version_facts,
    weights_fingerprint,
)
from redline.ladder.gate import Score
from redline.ladder.job import Job
from redline.ladder.measuring.judge import as_dtype, check_reference, check_state, detached, judge
from redline.ladder.measuring.trial import FRESH_SEEDS
from redline.ladder.plan import Plan, read_plan
from redline.ladder.rungs.tf32 import strict_fp32
from redline.ladder.search.progress import Progress, no_progress, print_progress
from redline.ladder.workload import SAMPLE_SEEDS, Inputs, Workload
from redline.ladder.workloads.addresses import as_workload
from redline.machine.machine import Machine, resolve_device


@dataclass(frozen=True)
class Exported:
    """An artifact that was written, with its manifest, and its size."""

    path: Path
    manifest: Manifest
    bytes: int

    @property
    def load_s(self) -> float:
        """The time from the start of a new process to its first output."""
        return self.manifest.load_s


def export(
    plan: Plan | str | os.PathLike[str],
    workload: str | Workload,
    out: str | os.PathLike[str],
    *,
    options: Mapping[str, Any] | None = None,
    device: str = "auto",
    progress: Progress | None = print_progress,
) -> Exported:
    """Writes an artifact that `redline.load_exported` loads in seconds.

    The artifact takes inputs of the workload's shapes. It is loaded in a new process and compared with the untouched
    model in fp32. It is put in place only if the workload's gates pass, so an existing artifact survives a failure.

    Args:
        plan: A `Plan`, a plan in one line, or a plan file.
        workload: A `Workload`, or the address of a function that returns one.
        out: `model.pt2` is an AOTInductor package, `model.onnx` an ONNX file, and a name without a suffix a folder.
        options: Options of the workload's function, such as `{"batch": 1}`.
        device: `"cpu"`, `"cuda"`, `"cuda:1"`; `"auto"` uses a GPU if there is one.
        progress: Called with the name of each step. By default steps are printed to stderr; None prints nothing.
    """
    plan, progress = read_plan(plan), progress or no_progress
    form, target = form_for(os.fspath(out)), Path(out)
    _check_target(target, form)
    workload = as_workload(workload, options)
    if workload.training:
        raise PlanError(f"{workload.label} is a training workload, and only inference can be exported.")
    machine = Machine.detect(resolve_device(device))
    check_rungs(form, FORMS, plan, machine)
    remove_abandoned(target.parent)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        beside = hidden_path(target)
        beside.mkdir()
    except OSError as error:
        raise CannotWrite(target, error) from error
    try:
        with torch.random.fork_rng(devices=[machine.device] if machine.is_cuda else []):
            made, manifest = _make(plan, workload, form, machine, beside, lambda text: progress(text, None))
        put_in_place(made, target, beside)
    except OSError as error:
        if isinstance(error, RedlineError):
            raise
        raise CannotWrite(target, error) from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return Exported(target, manifest, _size(target))


def _make(
    plan: Plan, workload: Workload, form: ArtifactForm, machine: Machine, folder: Path, tell: Callable[[str], None]
) -> tuple[Path, Manifest]:
    """Writes the artifact into `folder`, and judges the outputs that it gives in a new process.

    Returns the path of the artifact in `folder`, and its manifest. Raises ModelError if a gate fails.
    """
    tell("running the untouched model")
    model = workload.fresh_model(machine.device)
    weights = weights_fingerprint(model)
    batches = [workload.fresh_inputs(seed, machine.device) for seed in FRESH_SEEDS]
    expected = _reference(workload, batches, form, machine)
    samples = tuple(workload.fresh_inputs(seed, machine.device) for seed in SAMPLE_SEEDS)
    source = Source(workload, model, samples, plan, machine)
    # Both files have the same name, because the paths inside a .pt2 package begin with the name of its file.
    draft, sealed = folder / "draft" / f"model{form.suffix}", folder / f"model{form.suffix}"
    draft.parent.mkdir()
    tell(f"applying {plan}")
    written = form.write(source, sealed if isinstance(form, Folder) else draft, tell)
    manifest = Manifest(
        form=form.name,
        plan=replace(written.plan, objective=plan.objective).to_toml(),
        workload=workload.address,
        options=dict(workload.options),
        weights=weights,
        inputs=written.inputs,
        outputs=written.outputs,
        device=machine.device,
        host_inputs=workload.host_inputs,
        machine=machine_facts(machine),
        versions=version_facts(machine),
        session=written.session or {},
    )
    draft = sealed if isinstance(form, Folder) else draft

    def checked() -> Manifest:
        """Seals the artifact, loads it in a new process, and returns its manifest with the scores and the load time."""
        ready = replace(manifest, digests=form.digests(draft))
        form.seal(draft, ready, sealed)
        tell("loading the artifact in a new process")
        with tempfile.TemporaryDirectory(prefix="redline-export-") as empty:
            # The caches of the compilers are empty, so the load time is that of a machine that has never compiled.
            outputs, load_s = _run(sealed, workload, batches, folder, _environment(Path(empty)))
        scores = _judged(workload, expected, outputs)
        ready = replace(ready, scores=tuple(scores), load_s=round(load_s, 3))
        form.seal(draft, ready, sealed)
        return ready

    traced = written.traced
    if not traced:
        try:
            return sealed, checked()
        except ModelError as error:
            if not (isinstance(form, Folder) and form.drop_compiled_part(sealed)):
                raise
            traced = str(error).partition("; nothing was written")[0]
    if isinstance(form, Folder):
        form.seal(sealed, replace(manifest, digests=form.digests(sealed)), sealed)
        tell("compiling")
        with tempfile.TemporaryDirectory(prefix="redline-export-") as compiled:
            _run(sealed, workload, batches[:1], folder, _environment(Path(compiled)))
            form.keep_compiled(sealed, Path(compiled))
    manifest = checked()
    warnings.warn(
        f"{workload.label} cannot be compiled ahead of time for a folder: {traced}. A process that loads the folder "
        f"traces the model again, which takes {manifest.load_s:.1f} s here.",
        stacklevel=3,
    )
    return sealed, manifest


def _environment(compiled: Path) -> dict[str, str]:
    """Returns the environment of a process whose compilers use this folder as their cache."""
    # TRITON_CACHE_DIR is removed so that Triton's cache is inside the compiler's cache, where torch puts it.
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_CACHE_DIR"}
    return {**kept, "TORCHINDUCTOR_CACHE_DIR": str(compiled)}


def _reference(workload: Workload, batches: Sequence[Inputs], form: ArtifactForm, machine: Machine) -> list[Any]:
    """Returns the outputs of the untouched model in fp32, which the artifact has to match."""
    job = Job.of_workload(workload, workload.fresh_model(machine.device).float())
    run, inputs = job.finish(), [as_dtype(batch, "fp32") for batch in batches]
    with strict_fp32():
        state = check_state(workload, job.model, run, inputs[:2])
        if state and not isinstance(form, Folder):
            raise ModelError(f"{workload.label}: {state}, which {form.title} cannot hold: export to a folder.")
        results = [workload.step(run, batch) for batch in inputs]
    check_reference(workload, FRESH_SEEDS, results)
    return [as_dtype(detached(result), "fp32") for result in results]


def _run(
    artifact: Path, workload: Workload, batches: Sequence[Inputs], scratch: Path, environment: Mapping[str, str]
) -> tuple[list[Any], float]:
    """Returns the outputs of the artifact in a new process, and the time until its first call has ended."""
    with fresh_process(artifact, scratch, environment) as loaded:
        try:
            return [detached(workload.step(loaded, batch)) for batch in batches], loaded.load_s
        except LoadFailed as error:
            raise ModelError(f"the artifact does not run in a new process: {error}; nothing was written.") from error


def _judged(workload: Workload, expected: Sequence[Any], outputs: Sequence[Any]) -> list[Score]:
    try:
        scores = judge(workload.gates, expected, outputs)
    except Refused as error:
        raise ModelError(
            f"the artifact is not like the model: {str(error).rstrip('.')}; nothing was written."
        ) from error
    failed = [score for score in scores if not score.passed]
    if failed:
        raise ModelError(f"the artifact differs too much from the model: {failed[0]}; nothing was written.")
    return scores


def _check_target(target: Path, form: ArtifactForm) -> None:
    if isinstance(form, Folder):
        if target.exists() and not target.is_dir():
            raise RedlineError(f"cannot write {str(target)!r}: it is a file, and a name without a suffix is a folder.")
        if target.is_dir() and any(target.iterdir()) and not (target / "manifest.json").is_file():
            raise RedlineError(f"cannot write {str(target)!r}: the folder has files that are not of an export.")
    check_can_write(target.parent)


def put_in_place(made: Path, target: Path, beside: Path) -> None:
    """Moves the artifact to `target`.

    A rename cannot replace a folder that has files, so an existing folder is first moved into `beside`, and moved back
    if the second rename fails.
    """
    if not made.is_dir():
        os.chmod(made, 0o644)
        os.replace(made, target)
        return
    aside = beside / "replaced"
    with suppress(FileNotFoundError):
        os.rename(target, aside)
    try:
        os.rename(made, target)
    except BaseException:
        if aside.exists():
            os.rename(aside, target)
        raise


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else sum(f.stat().st_size for f in path.rglob("*") if f.is_file())

"""The artifact form of a folder: weights, plan and compiled code, from which the model is rebuilt without a search.

A folder can hold every rung except onnxruntime, and models that keep state. Loading it needs the code of the workload.
"""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_model, save_model

from redline.errors import ModelError, RedlineError, WorkloadError, first_line
from redline.files.atomic import write_text
from redline.files.untrusted import reading
from redline.files.weights import open_safetensors
from redline.ladder.exports.artifact_form import ArtifactForm, Source, Written
from redline.ladder.exports.call_form import describe, describe_call
from redline.ladder.exports.compiled_part import FACTS, PACKAGE, CompiledPart, warn_of_tracing, why_not
from redline.ladder.exports.manifest import Manifest, why_code_cannot_run
from redline.ladder.job import Job
from redline.ladder.plan import Plan, Unavailable
from redline.ladder.rewrites.per_shape import as_call
from redline.ladder.rewrites.sample_run import state_preserved
from redline.ladder.rungs.compile import Compile
from redline.ladder.rungs.threads import Threads
from redline.ladder.workload import SAMPLE_SEEDS, call
from redline.ladder.workloads.addresses import load_workload
from redline.machine.machine import Machine
from redline.machine.version import VERSION

_MANIFEST, _WEIGHTS, _PLAN, _CACHE = "manifest.json", "weights.safetensors", "plan.toml", "cache"
# Files of the compiler's cache that are left out of the folder: only compiling needs them.
_NOT_KEPT = ("precompiled_headers", "locks", "*.gch", "*.lock", "*.tmp")


class Folder(ArtifactForm):
    name = "folder"
    title = "a folder"
    short = "a folder"
    suffix = ""
    refused = frozenset({"onnxruntime"})

    def write(self, source: Source, path: Path, progress: Callable[[str], None]) -> Written:
        if not source.workload.address:
            raise WorkloadError("a folder is loaded with its workload's code, so the workload needs an address.")
        path.mkdir()
        save_model(source.model, str(path / _WEIGHTS))
        (path / _WEIGHTS).chmod(0o644)
        batch = source.samples[0]
        with state_preserved(source.model), torch.no_grad():
            args, kwargs = as_call(batch, source.device)
            inputs = describe_call(args, kwargs, strict=False)
            outputs = describe(call(source.model, (*args,) if args else kwargs), "output", strict=False)
        resolved, traced = _build(source, path, progress)
        resolved = replace(resolved, objective=source.plan.objective)
        write_text(path / _PLAN, resolved.to_toml())
        return Written(resolved, inputs, outputs, traced=traced)

    def drop_compiled_part(self, path: Path) -> bool:
        """Removes the compiled part; returns whether there was one."""
        if not (path / FACTS).exists():
            return False
        (path / FACTS).unlink()
        (path / PACKAGE).unlink()
        return True

    def keep_compiled(self, path: Path, compiled: Path) -> None:
        """Copies the compiler's cache `compiled` into the folder, without the files of `_NOT_KEPT`."""
        shutil.copytree(compiled, path / _CACHE, ignore=shutil.ignore_patterns(*_NOT_KEPT), dirs_exist_ok=True)

    def seal(self, path: Path, manifest: Manifest, target: Path) -> None:
        write_text(path / _MANIFEST, manifest.to_json() + "\n")

    def digests(self, path: Path) -> dict[str, str]:
        found = sorted(file for file in path.rglob("*") if file.is_file() and file.name != _MANIFEST)
        return {file.relative_to(path).as_posix(): _sha256(file) for file in found}

    def read(self, path: Path) -> Manifest | None:
        if not (path / _MANIFEST).is_file():
            return None
        with reading(path / _MANIFEST, "manifest", ModelError):
            manifest = Manifest.from_json((path / _MANIFEST).read_bytes(), str(path))
        if not {_WEIGHTS, _PLAN} <= manifest.digests.keys():
            raise ModelError(f"the manifest of {str(path)!r} is damaged: it does not list {_WEIGHTS} and {_PLAN}.")
        for name, digest in manifest.digests.items():
            file = path / name
            if not file.is_file():
                raise ModelError(f"{str(path)!r} is incomplete: {name!r} is missing; export it again.")
            if _sha256(file) != digest:
                raise ModelError(f"{str(file)!r} has changed since it was exported: export it again.")
        return manifest

    def load(self, path: Path, manifest: Manifest, machine: Machine) -> Job:
        plan = Plan.load(path / _PLAN)
        workload = load_workload(manifest.workload, manifest.options)
        with torch.random.fork_rng(devices=[machine.device] if machine.is_cuda else []):
            model = workload.fresh_model(machine.device)
            samples = tuple(workload.fresh_inputs(seed, machine.device) for seed in SAMPLE_SEEDS)
        with open_safetensors(path / _WEIGHTS):
            pass  # raises if the header is damaged
        try:
            load_model(model, path / _WEIGHTS, device=machine.device)
        except RuntimeError as error:
            raise ModelError(
                f"{manifest.workload} no longer builds the model of {str(path)!r}: {first_line(error)}."
            ) from error
        use_compiled_code(path, [name for name in manifest.digests if name.startswith(f"{_CACHE}/")])
        # Leaves out `threads` if torch already uses this number of threads, because the rung would then be refused.
        rungs = tuple(rung for rung in plan.rungs if not _is_set(rung))
        if (part := CompiledPart.read(path)) is not None:
            if reason := _why_not_compiled(manifest, machine):
                warn_of_tracing(path, reason)
            else:
                rungs = tuple(part.in_place_of(rung, path, plan, machine) for rung in rungs)
        return Plan(rungs).build(Job.of_workload(workload, model, samples), machine)[1]


def _build(source: Source, path: Path, progress: Callable[[str], None]) -> tuple[Plan, str]:
    """Applies the plan, and compiles the model ahead of time if the plan has `compile`.

    Returns the plan with its automatic choices resolved, and the reason if the model cannot be compiled ahead of time.
    """
    compiled = next((index for index, rung in enumerate(source.plan.rungs) if isinstance(rung, Compile)), None)
    if compiled is None:
        return source.build(source.plan)[0], ""
    before, job = source.build(Plan(source.plan.rungs[:compiled]))
    rung = source.plan.rungs[compiled]
    assert isinstance(rung, Compile)
    if reason := rung.why_not(source.machine, job):
        raise Unavailable(rung, reason)
    if not (reason := why_not(rung, source.plan, source.machine)):
        progress("compiling ahead of time")
        try:
            CompiledPart.compile(job, rung, source.samples[0], source.machine, path)
        except RedlineError as error:
            # Removes the advice to export to a folder, which is for the other forms.
            reason = str(error).partition(": export to a folder")[0].rstrip(".")
            (path / PACKAGE).unlink(missing_ok=True)
    after, _ = Plan(source.plan.rungs[compiled:]).build(job, source.machine)
    return Plan((*before.rungs, *after.rungs)), reason


def _why_not_compiled(manifest: Manifest, machine: Machine) -> str:
    """Returns why the compiled part cannot be used on this machine; empty if it can.

    Another version of Redline may build another layout of the weights, so the versions must be equal.
    """
    if manifest.versions.get("redline") != VERSION:
        return f"it was exported with Redline {manifest.versions.get('redline')}, and this is {VERSION}"
    reason = why_code_cannot_run(manifest, machine)
    return f"it {reason.partition(':')[0]}" if reason else ""


def use_compiled_code(folder: Path, names: list[str]) -> None:
    """Copies compiled code from the folder into the compiler's cache, so that the compiler need not compile it again.

    The compiler looks up its cache by a digest of the code to compile. Files that the cache already has are not
    replaced, because a process may have them open.
    """
    if not names:
        return
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    try:
        for name in names:
            target = Path(cache_dir(), *Path(name).parts[1:])
            if not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                handle, temporary = tempfile.mkstemp(dir=target.parent)
                os.close(handle)
                try:
                    shutil.copy2(folder / name, temporary)
                    os.replace(temporary, target)
                finally:
                    with suppress(FileNotFoundError):
                        os.unlink(temporary)
    except OSError as error:
        raise RedlineError(f"cannot write into the compiler's cache {cache_dir()!r}: {error.strerror}.") from error


def _is_set(rung: object) -> bool:
    return isinstance(rung, Threads) and rung.count == torch.get_num_threads() and not rung.pin


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

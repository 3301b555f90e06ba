"""The artifact form `.pt2`: a model compiled ahead of time by AOTInductor, with weights and kernels in one file."""

import hashlib
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

from redline.errors import ModelError
from redline.files.untrusted import reading
from redline.ladder.exports.ahead_of_time import PackagedModel, compile_ahead
from redline.ladder.exports.artifact_form import CALL_RUNGS, ArtifactForm, Source, Written, loaded_job
from redline.ladder.exports.manifest import Manifest
from redline.ladder.job import Job
from redline.ladder.plan import Plan
from redline.ladder.rungs.compile import Compile
from redline.machine.machine import Machine

_ENTRY = "model/extra/redline.json"


class AotPackage(ArtifactForm):
    name = "aot"
    title = "an AOTInductor package"
    short = "an AOTInductor package (.pt2)"
    suffix = ".pt2"
    refused = frozenset({"onnxruntime", "openvino", "tensorrt", "streams"})
    compiled = True

    def why_not(self, plan: Plan, machine: Machine) -> str:
        rung = _compile_rung(plan)
        if machine.is_cuda and rung.uses_cuda_graphs:
            return (
                f"compile(mode={rung.mode}) captures CUDA graphs inside torch.compile: export to a folder, or write "
                "compile + cuda_graph"
            )
        return rung.why_not(machine)

    def write(self, source: Source, path: Path, progress: Callable[[str], None]) -> Written:
        rung, plan = _compile_rung(source.plan), source.plan
        inner = Plan(tuple(r for r in plan.rungs if r.name not in (*CALL_RUNGS, rung.name)))
        resolved, job = source.build(inner)
        progress("compiling ahead of time")
        inputs, outputs, _ = compile_ahead(job, rung, source.samples[0], source.machine, path)
        others = [r for r in plan.rungs if r.name in CALL_RUNGS or r.name == rung.name]
        return Written(Plan.of([*resolved.rungs, *others]), inputs, outputs)

    def seal(self, path: Path, manifest: Manifest, target: Path) -> None:
        shutil.copyfile(path, target)
        with zipfile.ZipFile(target, "a") as package:
            package.writestr(_ENTRY, manifest.to_json())

    def digests(self, path: Path) -> dict[str, str]:
        with zipfile.ZipFile(path) as package:
            return {"package": _digest(package)}

    def read(self, path: Path) -> Manifest | None:
        if not zipfile.is_zipfile(path):
            return None
        with reading(path, "package", ModelError, (zipfile.BadZipFile,)), zipfile.ZipFile(path) as package:
            if _ENTRY not in package.namelist():
                return None
            manifest = Manifest.from_json(package.read(_ENTRY), str(path))
            if _digest(package) != manifest.digests.get("package"):
                raise ModelError(f"{str(path)!r} has changed since it was exported: export it again.")
        return manifest

    def load(self, path: Path, manifest: Manifest, machine: Machine) -> Job:
        alone = 'name = "cuda_graph"' in manifest.plan
        model = PackagedModel(path, manifest.inputs, manifest.outputs, manifest.device, alone)
        return loaded_job(model, manifest, machine)


def _compile_rung(plan: Plan) -> Compile:
    """Returns the rung `compile` with whose options the package is compiled: the plan's, or one with defaults."""
    return next((rung for rung in plan.rungs if isinstance(rung, Compile)), Compile())


def _digest(package: zipfile.ZipFile) -> str:
    """Returns a SHA-256 of the names and contents of all files in the package except the manifest."""
    digest = hashlib.sha256()
    for item in package.infolist():
        if item.filename != _ENTRY:
            digest.update(f"{item.filename} {item.file_size}\n".encode())
            with package.open(item) as file:
                while block := file.read(1 << 20):
                    digest.update(block)
    return digest.hexdigest()

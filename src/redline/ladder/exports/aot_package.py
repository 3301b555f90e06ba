"""The form `.pt2`: a model that AOTInductor compiled ahead of time, with its weights and kernels in one file.

It is loaded with the C++ loader of torch, without torch.export, the compiler or the model's own code.
"""

import hashlib
import importlib
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from redline.errors import ModelError, RungError, first_line
from redline.files.untrusted import reading
from redline.ladder.exports.artifact_form import CALL_RUNGS, ArtifactForm, Source, Written, loaded_job
from redline.ladder.exports.call_form import describe, describe_call, restore, tensors_of_call
from redline.ladder.exports.compiler_cache import compiler_cache
from redline.ladder.exports.manifest import Manifest
from redline.ladder.job import Job, entered
from redline.ladder.plan import Plan
from redline.ladder.rewrites.per_shape import FlatModel, as_call, flat_tensors
from redline.ladder.rungs.compile import Compile
from redline.machine.machine import Machine
from redline.quiet import quiet

_ENTRY = "model/extra/redline.json"
_MODEL = "model"


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
        args, kwargs = as_call(source.samples[0], job.device)
        tensors = [tensor.detach().contiguous() for tensor in flat_tensors(args, kwargs)]
        progress("compiling ahead of time")
        with entered(job.contexts), torch.no_grad(), compiler_cache(source.machine):
            inputs, outputs = describe_call(args, kwargs), describe(job.model(*args, **kwargs), "output")
            flat = FlatModel("compile", job.model, args, kwargs)
            try:
                with quiet():
                    # Imported here because the compiler is large.
                    inductor = importlib.import_module("torch._inductor")
                    program = torch.export.export(flat.eval(), tuple(tensors), strict=False)
                    options = rung.compiler_options(source.machine.is_cuda)
                    inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs=options)
            except Exception as error:  # the exporter and the compiler raise many types
                raise RungError(f"compiling the model ahead of time failed: {first_line(error)}.") from error
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
        index = torch.device(manifest.device).index
        # Without threads of its own, because its locks cannot be captured in a CUDA graph.
        alone = 'name = "cuda_graph"' in manifest.plan
        try:
            loader: Any = torch._C._aoti.AOTIModelPackageLoader(
                str(path), _MODEL, alone, 1, -1 if index is None else index
            )
        except RuntimeError as error:
            raise ModelError(f"torch cannot load {str(path)!r}: {first_line(error)}.") from error
        return loaded_job(PackagedModel(loader, manifest), manifest, machine)


class PackagedModel(nn.Module):
    """Calls the compiled package like the model from which it was exported."""

    home: Tensor

    def __init__(self, loader: Any, manifest: Manifest) -> None:
        super().__init__()
        self._loader, self._inputs, self._outputs = loader, manifest.inputs, manifest.outputs
        # Tells rungs the device, because the weights are inside the package.
        self.register_buffer("home", torch.empty(0, device=manifest.device), persistent=False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        tensors = tensors_of_call(self._inputs, args, kwargs)
        return restore(self._outputs, self._loader.boxed_run([tensor.contiguous() for tensor in tensors]))


def _compile_rung(plan: Plan) -> Compile:
    """Returns the plan's rung `compile`, whose options the package is compiled with, or the rung with its defaults."""
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

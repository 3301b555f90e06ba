"""The compiled part of an exported folder: an AOTInductor package that uses the weights of the folder.

For inputs of the exported form, the first call runs the package, and neither imports torch's compiler nor traces the
model. For other inputs, the model is traced and compiled with the options of the plan's rung `compile`.
"""

import json
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from redline.errors import ModelError, first_line
from redline.files.atomic import write_text
from redline.files.untrusted import check_types, field_types, read_json
from redline.ladder.exports.ahead_of_time import PackagedModel, compile_ahead
from redline.ladder.job import Applied, Job, entered
from redline.ladder.plan import Plan, Unavailable
from redline.ladder.rewrites.output_check import state_of
from redline.ladder.rung import Rung
from redline.ladder.rungs.compile import Compile
from redline.ladder.workload import Inputs
from redline.machine.machine import Machine

PACKAGE, FACTS = "compiled.pt2", "compiled.json"
# The names of the weights in the package begin with this, because `FlatModel` holds the model as attribute `model`.
_PREFIX = "model."
# Options that keep the weights out of the package. The second is for small weights, which the compiler would otherwise
# write into the code.
_WITHOUT_WEIGHTS = {"aot_inductor.package_constants_in_so": False, "always_keep_tensor_constants": True}


@dataclass(frozen=True)
class CompiledPart:
    """Describes the package: the forms of its inputs and outputs, and the layouts of the weights that it uses.

    `weights` is empty if the package contains its own weights (see `_shares_weights`).
    `threads` is the number of threads that CPU kernels were compiled for.
    """

    inputs: Mapping[str, Any]
    outputs: Mapping[str, Any]
    weights: Mapping[str, Any]
    threads: int

    @classmethod
    def compile(cls, job: Job, rung: Compile, sample: Inputs, machine: Machine, folder: Path) -> "CompiledPart":
        """Writes the package into the folder; raises a RedlineError if the model cannot be compiled ahead of time."""
        path = folder / PACKAGE
        if str(state := state_of(job)):
            raise ModelError(f"{state}, which is lost when the model is exported")

        def options(program: Any) -> Mapping[str, Any]:
            return _WITHOUT_WEIGHTS if _shares_weights(rung, program) else {}

        inputs, outputs, program = compile_ahead(job, rung, sample, machine, path, options)
        if changed := _changed(program.graph_signature):
            raise ModelError(f"the model writes into {changed}, which is lost when the model is exported")
        weights: dict[str, Any] = {}
        if _shares_weights(rung, program):
            names = PackagedModel(path, inputs, outputs, machine.device, single_threaded=True).constants()
            held = _weights(job.model)
            if unknown := [name for name in names if name not in held]:
                raise ModelError(f"the compiled code has a constant that is no weight of the model ({unknown[0]!r})")
            weights = {name: _layout(held[name]) for name in names}
        with entered(job.contexts):  # the plan may set the number of threads
            part = cls(inputs, outputs, weights, torch.get_num_threads())
        path.chmod(0o644)
        write_text(folder / FACTS, json.dumps(asdict(part)) + "\n")
        return part

    @classmethod
    def read(cls, folder: Path) -> "CompiledPart | None":
        """Returns the compiled part of a folder; None if there is none."""
        if not (folder / FACTS).is_file():
            return None
        data = read_json(folder / FACTS, "compiled part", ModelError)
        check_types(data, field_types(cls), str(folder / FACTS), ModelError)
        return cls(**{item.name: data[item.name] for item in fields(cls)})

    def in_place_of(self, rung: Rung, folder: Path, plan: Plan, machine: Machine) -> Rung:
        """Returns a `CompiledAhead` with this part if the rung is `compile`; otherwise returns the rung unchanged."""
        if not isinstance(rung, Compile):
            return rung
        options = {item.name: getattr(rung, item.name) for item in rung.options()}
        return CompiledAhead(**options, part=self, folder=folder, machine=machine, single_threaded="cuda_graph" in plan)

    def open(self, folder: Path, model: nn.Module, device: str, single_threaded: bool) -> PackagedModel:
        """Opens the package with the weights of the model; raises ModelError if a weight has another layout."""
        held = _weights(model)
        for name, layout in self.weights.items():
            if name not in held or _layout(held[name]) != layout:
                raise ModelError(f"it was compiled for another layout of the weight {name.removeprefix(_PREFIX)!r}")
        package = PackagedModel(folder / PACKAGE, self.inputs, self.outputs, device, single_threaded)
        if self.weights:
            package.use_constants({name: held[name] for name in self.weights})
        return package


@dataclass(frozen=True)
class CompiledAhead(Compile):
    """Replaces the rung `compile` when a folder with a compiled part is loaded.

    It runs the package where possible, and compiles the model for inputs that the package does not take.
    """

    part: CompiledPart | None = None
    folder: Path = Path()
    machine: Machine | None = None
    single_threaded: bool = False

    def why_not(self, machine: Machine, job: Job | None = None) -> str:
        return ""  # the package needs no compiler

    def apply(self, job: Job) -> Job:
        assert self.part is not None and self.machine is not None
        rung = Compile(**{item.name: getattr(self, item.name) for item in Compile.options()})
        try:
            package = self.part.open(self.folder, job.model, self.machine.device, self.single_threaded)
        except ModelError as error:
            warn_of_tracing(self.folder, first_line(error))
            return rung.apply(job)
        threads = 0 if self.machine.is_cuda else self.part.threads
        return replace(job, model=PackageFirst(package, job, rung, self.machine, self.folder, threads))


class PackageFirst(nn.Module):
    """Runs the package for inputs of its form, and the model that the rung compiles for all other inputs."""

    def __init__(
        self, package: PackagedModel, job: Job, rung: Compile, machine: Machine, folder: Path, threads: int
    ) -> None:
        super().__init__()
        self.model, self.package = job.model, package
        self._rung, self._machine, self._folder, self._threads = rung, machine, folder, threads
        # The job already applies its settings and wrappers around this module, so tracing must not apply them again.
        self._job = replace(job, contexts=(), wrappers=(), host_inputs=False)
        self._traced: list[Applied] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        try:
            tensors = self.package.tensors(args, kwargs)
        except ModelError as error:
            return self._trace(first_line(error).partition(":")[0])(*args, **kwargs)
        if self._threads and self._threads != torch.get_num_threads():
            return self._trace(f"it was compiled for {self._threads} threads")(*args, **kwargs)
        return self.package.run(tensors)

    def _trace(self, reason: str) -> Applied:
        """Returns the model compiled by the rung, whose first call takes long because it traces and compiles."""
        if not self._traced:
            if lacking := self._rung.why_not(self._machine, self._job):
                raise Unavailable(self._rung, lacking)
            warn_of_tracing(self._folder, reason)
            applied = self._rung.apply(self._job).finish()
            assert isinstance(applied, Applied)
            self._traced.append(applied)
        return self._traced[0]


def why_not(rung: Compile, plan: Plan, machine: Machine) -> str:
    """Returns why a folder of this plan has no compiled part; empty if it may have one."""
    if rung.regional:
        return "compile(regional=true) compiles blocks"
    if rung.dynamic == "true":
        return "compile(dynamic=true) compiles kernels for any size"
    if machine.is_cuda and rung.uses_cuda_graphs:
        return f"compile(mode={rung.mode}) captures CUDA graphs"
    if "streams" in plan:
        return "streams splits the inputs"
    return ""


def warn_of_tracing(folder: Path, reason: str) -> None:
    warnings.warn(
        f"the compiled code of {str(folder)!r} is not used, because {reason}: the model is traced and compiled now, "
        "which takes longer.",
        stacklevel=2,
    )


def _shares_weights(rung: Compile, program: Any) -> bool:
    """Returns whether the package can use the weights of the model instead of weights of its own.

    It cannot if `freeze` changes the weights, or if the program has constant tensors that the model creates in its
    forward pass, because these are not among the weights.
    """
    return not rung.freeze and not program.graph_signature.lifted_tensor_constants


def _weights(model: nn.Module) -> dict[str, Tensor]:
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {f"{_PREFIX}{name}": tensor.detach() for name, tensor in named}


def _layout(tensor: Tensor) -> list[Any]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return [dtype, list(tensor.shape), list(tensor.stride()), tensor.storage_offset()]


def _changed(signature: Any) -> str:
    """Returns the names of the buffers and inputs that the exported program writes into."""
    return ", ".join([*signature.buffers_to_mutate.values(), *signature.user_inputs_to_mutate.values()])

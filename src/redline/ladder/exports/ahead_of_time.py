"""Compiles a model ahead of time into an AOTInductor package, and runs such a package.

A package is loaded with the C++ loader of torch, without torch.export, the compiler or the model's own code. This
module calls the loader directly, because torch's public function for it, `aoti_load_package`, imports the compiler
first.
"""

import importlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from redline.errors import ModelError, RungError, first_line
from redline.ladder.exports.call_form import Form, describe, describe_call, restore, tensors_of_call
from redline.ladder.exports.compiler_cache import compiler_cache
from redline.ladder.job import Job, entered
from redline.ladder.rewrites.per_shape import FlatModel, as_call, flat_tensors
from redline.ladder.rungs.compile import Compile
from redline.ladder.workload import Inputs
from redline.machine.machine import Machine
from redline.machine.quiet import quiet

_MODEL = "model"


def compile_ahead(
    job: Job,
    rung: Compile,
    sample: Inputs,
    machine: Machine,
    path: Path,
    options: Callable[[Any], Mapping[str, Any]] = lambda program: {},
) -> tuple[Form, Form, Any]:
    """Writes the package for inputs like the sample; returns the forms of inputs and outputs, and the exported program.

    A form is a description of tensors and their nesting (see call_form). `options` returns further options of the
    compiler for the exported program.
    """
    args, kwargs = as_call(sample, job.device)
    tensors = [tensor.detach().contiguous() for tensor in flat_tensors(args, kwargs)]
    with entered(job.contexts), torch.no_grad(), compiler_cache(machine):
        inputs, outputs = describe_call(args, kwargs), describe(job.model(*args, **kwargs), "output")
        flat = FlatModel("compile", job.model, args, kwargs)
        try:
            with quiet():
                # Imported here because the compiler is large.
                inductor = importlib.import_module("torch._inductor")
                program = torch.export.export(flat.eval(), tuple(tensors), strict=False)
                configs = {**rung.compiler_options(machine.is_cuda), **options(program)}
                inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs=configs)
        except Exception as error:  # the exporter and the compiler raise many types
            raise RungError(f"compiling the model ahead of time failed: {first_line(error)}.") from error
    return inputs, outputs, program


class PackagedModel(nn.Module):
    """Calls a package like the model from which it was compiled."""

    home: Tensor

    def __init__(self, path: Path, inputs: Form, outputs: Form, device: str, single_threaded: bool) -> None:
        """Opens the package.

        `single_threaded` turns off the loader's locks. CUDA graphs need this, because locks cannot be captured.
        """
        super().__init__()
        self._inputs, self._outputs = inputs, outputs
        index = torch.device(device).index
        try:
            self._loader: Any = torch._C._aoti.AOTIModelPackageLoader(
                str(path), _MODEL, single_threaded, 1, -1 if index is None else index
            )
        except RuntimeError as error:
            raise ModelError(f"torch cannot load {str(path)!r}: {first_line(error)}.") from error
        # Rungs read the device from this empty buffer, because the weights are in the package and not in this module.
        self.register_buffer("home", torch.empty(0, device=device), persistent=False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self.tensors(args, kwargs))

    def tensors(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """Returns the tensors of a call; raises ModelError if the package does not take the call."""
        tensors = tensors_of_call(self._inputs, args, kwargs)
        for tensor in tensors:
            if tensor.device != self.home.device:
                raise ModelError(
                    f"an input is on {tensor.device}, but the artifact runs on {self.home.device}: move it."
                )
        return tensors

    def run(self, tensors: Sequence[Tensor]) -> Any:
        return restore(self._outputs, self._loader.boxed_run([tensor.contiguous() for tensor in tensors]))

    def constants(self) -> list[str]:
        """Returns the names of the weights and other constants of the package."""
        return self._loader.get_constant_fqns()

    def use_constants(self, tensors: dict[str, Tensor]) -> None:
        """Makes the package compute with these tensors, without a copy, so that a model can share its weights."""
        shared = {name: _alias(tensor) for name, tensor in tensors.items()}
        try:
            self._loader.load_constants(shared, False, True, True)
        except RuntimeError as error:
            raise ModelError(f"torch cannot use the weights: {first_line(error)}.") from error
        # torch never frees its handles to these tensors, so `_release` frees their memory when this module is deleted.
        weakref.finalize(self, _release, list(shared.values()))


def _alias(tensor: Tensor) -> Tensor:
    """Returns a second tensor on the same memory. `_release` can empty it and leave the first tensor intact."""
    place = tensor.storage_offset(), tensor.size(), tensor.stride()
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage(), *place)


def _release(aliases: list[Tensor]) -> None:
    for alias in aliases:
        alias.set_(torch.empty(0, device=alias.device).untyped_storage())

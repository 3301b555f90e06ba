"""The address `model.pt2`: a file that `torch.export.save` wrote, whose example inputs are used as samples."""

import inspect
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export.passes import move_to_device_pass

from redline.errors import WorkloadError
from redline.ladder.workload import Inputs, Workload
from redline.ladder.workload_prefixes import WorkloadPrefix, register_prefix
from redline.ladder.workloads.samples import random_like
from redline.machine.trees import tree_leaves, tree_map_only


class ExportedModel(nn.Module):
    """Runs an exported program; adds `train()` and `eval()`, which the program lacks, and accepts keyword arguments."""

    def __init__(self, program: Any) -> None:
        super().__init__()
        self.program = program.module()
        self._positional = list(inspect.signature(self.program.forward).parameters)[: len(program.example_inputs[0])]

    def train(self, mode: bool = True) -> "ExportedModel":
        self.training = mode
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        by_name = [kwargs.pop(name) for name in self._positional[len(args) :] if name in kwargs]
        return self.program(*args, *by_name, **kwargs)


def _find_function(path: str) -> Callable[..., Workload]:
    if not Path(path).is_file():
        raise WorkloadError(f"there is no file {path!r}.")
    if zipfile.is_zipfile(path) and any("aotinductor" in name for name in zipfile.ZipFile(path).namelist()):
        raise WorkloadError(
            f"{path!r} is compiled already (an AOTInductor package): give the file of torch.export.save, or load the "
            "package with redline.load_exported."
        )
    try:
        program = torch.export.load(path)
    except Exception as error:
        raise WorkloadError(
            f"cannot load {path!r}: it is not a file that torch.export.save wrote ({error})."
        ) from error
    if program.example_inputs is None:
        raise WorkloadError(f"{path!r} has no example inputs: write a file.py:function that loads it and makes inputs.")
    args, kwargs = program.example_inputs
    names = list(inspect.signature(program.module().forward).parameters)
    example: Inputs = dict(zip(names, args, strict=False)) | kwargs if kwargs else tuple(args)
    sizes = [leaf.shape[0] for leaf in tree_leaves(example) if isinstance(leaf, Tensor) and leaf.ndim]

    def model(batch: int = 0) -> Workload:
        """Returns the workload; `batch` is the size of the first axis if that axis is dynamic in the program."""

        def resized(tensor: Tensor) -> Tensor:
            alike = batch and tensor.ndim and len(tensor) == sizes[0]
            return tensor[torch.arange(batch, device=tensor.device) % len(tensor)] if alike else tensor

        def build() -> nn.Module:
            device = torch.get_default_device()
            return ExportedModel(move_to_device_pass(torch.export.load(path), device))

        def inputs(seed: int) -> Inputs:
            return tree_map_only(Tensor, lambda tensor: random_like(resized(tensor)), example)

        items = batch or (sizes[0] if sizes else 1)
        return Workload(build, inputs, items=items, unit="sample", name=Path(path).name)

    return model


register_prefix(WorkloadPrefix(".pt2", _find_function, ("model.pt2",)))

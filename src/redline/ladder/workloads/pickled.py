"""Workloads that exist in memory, sent to the trial processes in files, under the address `pickled:FOLDER`.

cloudpickle writes classes and functions by value if a new process cannot import them, for example those of a script's
`__main__` or of a notebook. So a trial process never runs the user's script.
"""

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from torch import nn

from redline.errors import WorkloadError
from redline.ladder.workload import Workload, describe_error
from redline.ladder.workload_prefixes import WorkloadPrefix, find_prefix, register_prefix


@dataclass(frozen=True)
class SavedModel:
    """Builds a model from the file that `save_model` wrote."""

    path: str

    def __call__(self) -> nn.Module:
        return torch.load(self.path, map_location="cpu", weights_only=False)


def save_model(model: nn.Module, path: Path) -> SavedModel:
    """Writes the model with its weights, so that a workload that refers to it stays small."""
    classes = {kind for module in model.modules() for kind in type(module).__mro__}
    _save(model, path, classes)
    return SavedModel(str(path))


def save_workload(workload: Workload, folder: Path) -> str:
    """Writes the workload to a folder, and returns its address for the trial processes."""
    functions = (workload.build, workload.inputs, workload.step, workload.loss, workload.optimizer)
    _save(workload, folder / "workload.pt", (*functions, *(gate.function for gate in workload.gates)))
    (folder / "path.json").write_text(json.dumps(sys.path), encoding="utf-8")
    return f"{_PREFIX.word}:{folder}"


def is_pickled(address: str) -> bool:
    return find_prefix(address) is _PREFIX


def _find_function(folder: str) -> Callable[[], Workload]:
    def workload() -> Workload:
        known = json.loads(Path(folder, "path.json").read_text(encoding="utf-8"))
        sys.path += [entry for entry in known if entry not in sys.path]
        return torch.load(Path(folder, "workload.pt"), map_location="cpu", weights_only=False)

    return workload


_PREFIX = WorkloadPrefix("pickled", _find_function, examples=())
register_prefix(_PREFIX)


def _save(value: Any, path: Path, parts: Iterable[Any]) -> None:
    """Writes `value`; the modules in which `parts` are defined are written too if a new process cannot import them."""
    names = {getattr(part, "__module__", None) or type(part).__module__ for part in parts if part is not None}
    modules = [sys.modules[name] for name in sorted(names) if name in sys.modules and not _is_importable(name)]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        torch.save(value, path, pickle_module=cloudpickle)
    except Exception as error:
        raise WorkloadError(
            f"cannot send the workload to the trial processes: {describe_error(error)}; give the address of a "
            "function that builds it (module:function or file.py:function) instead."
        ) from error
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


def _is_importable(name: str) -> bool:
    """Returns whether a new process finds the module; also True for `__main__`, which cloudpickle writes by value."""
    package = name.partition(".")[0]
    finders = [finder.find_spec for finder in sys.meta_path if hasattr(finder, "find_spec")]
    return package == "__main__" or any(find(package, None) is not None for find in finders)

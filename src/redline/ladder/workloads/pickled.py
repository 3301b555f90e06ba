"""Workloads that exist in memory, sent to the trial processes in files, under the address `pickled:FOLDER`.

cloudpickle writes classes and functions by value if a new process cannot import them, for example those of a script's
`__main__`, of a notebook, or of a file that was loaded by its path. So a trial process never runs the user's script.
torch.compile imports the module of each function that it traces, so loading creates modules with the original names.
"""

import functools
import importlib.util
import json
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
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
        return _load(Path(self.path))


def save_model(model: nn.Module, path: Path) -> SavedModel:
    """Writes the model with its weights to its own file, so that a workload that refers to the file stays small."""
    _save(model, path)
    return SavedModel(str(path))


def save_workload(workload: Workload, folder: Path) -> str:
    """Writes the workload to a folder, and returns its address for the trial processes."""
    _save(workload, folder / "workload.pt")
    (folder / "path.json").write_text(json.dumps(sys.path), encoding="utf-8")
    return f"{_PREFIX.word}:{folder}"


def is_pickled(address: str) -> bool:
    return find_prefix(address) is _PREFIX


def _find_function(folder: str) -> Callable[[], Workload]:
    def workload() -> Workload:
        known = json.loads(Path(folder, "path.json").read_text(encoding="utf-8"))
        sys.path += [entry for entry in known if entry not in sys.path]
        return _load(Path(folder, "workload.pt"))

    return workload


_PREFIX = WorkloadPrefix("pickled", _find_function, examples=())
register_prefix(_PREFIX)


def _save(value: Any, path: Path) -> None:
    """Writes `value`, including the code that it uses from loaded modules which a new process cannot import."""
    modules = [module for name, module in sorted(sys.modules.items()) if not _is_importable(name)]
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


@functools.cache
def _is_importable(name: str) -> bool:
    """Returns whether a new process can import the module; also True for `__main__`, always pickled by value."""
    package = name.partition(".")[0]
    finders = [finder.find_spec for finder in sys.meta_path if hasattr(finder, "find_spec")]
    return package == "__main__" or any(find(package, None) is not None for find in finders)


def _load(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=False, pickle_module=_WithModules)


class _WithModules:
    """A pickle module for `torch.load`: puts each function that it loads into a module with the original name."""

    class Unpickler(pickle.Unpickler):
        def find_class(self, module_name: str, global_name: str, /) -> Any:
            found = super().find_class(module_name, global_name)
            return _make_function if found is cloudpickle.cloudpickle._make_function else found

    load = staticmethod(pickle.load)


def _make_function(code: Any, namespace: dict[str, Any], *rest: Any) -> FunctionType:
    name = namespace.get("__name__", "")
    if name in _MODULES or name == "__main__" or not _exists(name):
        if name not in _MODULES:
            _MODULES[name] = sys.modules[name] = ModuleType(name)
        vars(_MODULES[name]).update(namespace)
        namespace = vars(_MODULES[name])
    return cloudpickle.cloudpickle._make_function(code, namespace, *rest)


def _exists(name: str) -> bool:
    try:
        return name in sys.modules or importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # raised if the module's package does not exist
        return False


# The modules that `_make_function` created, by name.
_MODULES: dict[str, ModuleType] = {}

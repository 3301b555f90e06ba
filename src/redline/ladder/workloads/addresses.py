"""Loads a workload by its address: a bundled name, `module:function`, `file.py:function`, or a registered prefix."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

# Each of these modules registers its kind of address, such as `timm:` or `.onnx`, when it is imported.
import redline.ladder.workloads.exported_program
import redline.ladder.workloads.onnx_file
import redline.ladder.workloads.pickled
import redline.ladder.workloads.timm_model
import redline.ladder.workloads.transformers_folder  # noqa: F401
from redline.errors import RedlineError, WorkloadError
from redline.ladder.workload import Workload, describe_error
from redline.ladder.workload_prefixes import PREFIXES, find_prefix
from redline.ladder.workloads import BUNDLED


def load_workload(address: str, options: Mapping[str, Any] | None = None) -> Workload:
    """Calls the function at an address: `module:function`, `file.py:function`, a bundled name, or a registered form
    such as `timm:NAME`, `hf:FOLDER`, `model.onnx`, `model.pt2` and `train:CONFIG`.

    `options` are the arguments of the function, such as the input shape.
    """
    options = dict(options or {})
    function = find_function(address)
    accepted = inspect.signature(function).parameters
    unknown = [name for name in options if name not in accepted]
    if unknown and not any(p.kind is p.VAR_KEYWORD for p in accepted.values()):
        known = ", ".join(accepted) or "none"
        raise WorkloadError(f"workload {address!r} takes no option {unknown[0]!r} (it takes: {known}).")
    try:
        workload = function(**options)
    except (Exception, SystemExit) as error:
        raise WorkloadError(f"workload {address!r} raised {describe_error(error)}.") from error
    if not isinstance(workload, Workload):
        kind = type(workload).__name__
        raise WorkloadError(f"workload {address!r} returned {kind}; return redline.Workload(build=…, inputs=…).")
    return replace(workload, name=workload.name or function.__name__, address=address, options=options)


def as_workload(workload: str | Workload, options: Mapping[str, Any] | None = None) -> Workload:
    """Returns a `Workload` unchanged, and loads an address. Raises if options are given for a `Workload`."""
    if isinstance(workload, str):
        return load_workload(workload, options)
    if options:
        raise RedlineError("options= is for the address of a workload, not for a Workload object.")
    return workload


def find_function(address: str) -> Callable[..., Any]:
    if address in BUNDLED:
        return BUNDLED[address]
    if prefix := find_prefix(address):
        try:
            return prefix.find_function(prefix.rest_of(address))
        except RedlineError:
            raise
        except Exception as error:  # a malformed file
            raise WorkloadError(f"cannot read {address!r}: {describe_error(error)}.") from error
    place, colon, name = address.rpartition(":")
    if not colon or not place or not name:
        forms = ", ".join(["module:function", "file.py:function", *(e for p in PREFIXES.values() for e in p.examples)])
        bundled = ", ".join(BUNDLED)
        raise WorkloadError(f"no workload {address!r}: write {forms}, or one of the bundled ones ({bundled}).")
    module = _import_file(Path(place)) if place.endswith(".py") else _import_module(place)
    function = getattr(module, name, None)
    if not callable(function):
        raise WorkloadError(f"workload {address!r}: {place} has no function {name!r}.")
    return function


def check_file(workload: str | Workload) -> None:
    """Raises WorkloadError if the address names a Python file that does not exist, before a worker pool is started."""
    if isinstance(workload, str) and not find_prefix(workload):
        place = workload.rpartition(":")[0]
        if place.endswith(".py") and not Path(place).is_file():
            raise WorkloadError(f"there is no file {place!r}.")


def _import_module(name: str) -> Any:
    # Makes modules in the working directory importable, where the user's own module usually is.
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise WorkloadError(f"cannot import {name!r}: {describe_error(error)}.") from error


def _import_file(path: Path) -> Any:
    if not path.is_file():
        raise WorkloadError(f"there is no file {str(path)!r}.")
    module_name = f"redline_workload_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    # Lets the file import other modules from its folder, as if it were run as a script.
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[module_name]
        raise WorkloadError(f"cannot import {str(path)!r}: {describe_error(error)}.") from error
    return module

"""A workload: what to run and how to judge it.

    def mine() -> Workload:
        return Workload(build=MyModel, inputs=lambda seed: torch.randn(8, 3, 224, 224))

`build` and `inputs` are called with the chosen device as torch's default device, and with torch's random seed set,
so that plain `torch.randn(...)` lands in the right place and another process rebuilds exactly the same.
"""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from redline.errors import RedlineError, WorkloadError
from redline.ladder.gate import INFERENCE_GATES, TRAINING_GATES, Gate

# An address that begins so names the settings of a training: a file, or bundled ones.
TRAINING = "train:"
Inputs = Any  # a tensor, a tuple (positional) or a dict (by name)
OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
LossFunction = Callable[[Any, Inputs], Tensor]


def call(model: Callable[..., Any], inputs: Inputs) -> Any:
    """Calls a model with inputs as a workload gives them."""
    if isinstance(inputs, dict):
        return model(**inputs)
    if isinstance(inputs, (tuple, list)):
        return model(*inputs)
    return model(inputs)


@dataclass(frozen=True)
class Workload:
    """What to run and how to judge it; with `loss` and `optimizer` one step is a whole training step."""

    build: Callable[[], nn.Module]
    inputs: Callable[[int], Inputs]
    gates: tuple[Gate, ...] = ()
    step: Callable[[Callable[..., Any], Inputs], Any] = call
    loss: LossFunction | None = None
    optimizer: OptimizerFactory | None = None
    items: float = 1.0
    unit: str = "call"
    # Inputs that live in host memory: each call copies them in and its output out, as a server does.
    host_inputs: bool = False
    # Half-precision weights of a training step follow fp32 ones, which the optimizer steps.
    master_weights: bool = False
    name: str = ""
    address: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.loss is None) != (self.optimizer is None):
            raise WorkloadError("a training workload needs both loss= and optimizer=.")
        if self.items <= 0:
            raise WorkloadError(f"items must be above zero, not {self.items}.")
        if self.loss is not None and self.step is not call:
            raise WorkloadError("a training workload is stepped by its loss and optimizer: leave step= out.")
        if self.host_inputs and self.loss is not None:
            raise WorkloadError("host_inputs is for inference; a training workload gives its batches on the device.")
        if isinstance(self.gates, Gate):
            object.__setattr__(self, "gates", (self.gates,))
        if not self.gates:
            object.__setattr__(self, "gates", TRAINING_GATES if self.training else INFERENCE_GATES)

    @property
    def training(self) -> bool:
        return self.loss is not None

    def fresh_model(self, device: str) -> nn.Module:
        """The model as the user builds it, always with the same weights."""
        torch.manual_seed(0)
        try:
            with torch.device(device):
                model = self.build()
        except Exception as error:
            raise WorkloadError(f"{self.label}: build() raised {_describe(error)}.") from error
        if not isinstance(model, nn.Module):
            raise WorkloadError(f"{self.label}: build() returned {type(model).__name__}, not a torch.nn.Module.")
        return model.to(device).train(self.training)

    def fresh_inputs(self, seed: int, device: str) -> Inputs:
        """One batch, the same for the same seed; lives where the workload says."""
        torch.manual_seed(1_000 + seed)
        home = "cpu" if self.host_inputs else device
        try:
            with torch.device(home):
                inputs = self.inputs(seed)
        except Exception as error:
            raise WorkloadError(f"{self.label}: inputs({seed}) raised {_describe(error)}.") from error
        for leaf in pytree.tree_leaves(inputs):
            if isinstance(leaf, Tensor) and leaf.device.type != torch.device(home).type:
                raise WorkloadError(
                    f"{self.label}: inputs({seed}) holds a tensor on {leaf.device} while the model runs on {home}; "
                    "build it without device=, or set host_inputs=True if it should start in host memory."
                )
        return inputs

    @property
    def label(self) -> str:
        return self.name or self.address or "workload"


def _describe(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    if isinstance(error, RedlineError) and text:
        return f'"{text[0].rstrip(".")}"'
    return f"{type(error).__name__}: {text[0] if text else 'no message'}"


def load_workload(address: str, options: Mapping[str, Any] | None = None) -> Workload:
    """Finds `module:function`, `file.py:function`, `train:CONFIG` or a bundled name; calls it with a shape."""
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
        raise WorkloadError(f"workload {address!r} raised {_describe(error)}.") from error
    if not isinstance(workload, Workload):
        raise WorkloadError(
            f"workload {address!r} returned {type(workload).__name__}; return redline.Workload(build=…, inputs=…)."
        )
    name = workload.name or function.__name__
    return replace(workload, name=name, address=address, options=options)


def find_function(address: str) -> Callable[..., Any]:
    from redline.ladder.workloads import BUNDLED  # bundled workloads are themselves built from this word

    if address in BUNDLED:
        return BUNDLED[address]
    if address.startswith(TRAINING):
        # Looked up late and by name: training stands above the ladder, and only such an address needs it.
        workloads = importlib.import_module("redline.training.text.workload")
        return workloads.training_workload(address.removeprefix(TRAINING))
    place, colon, name = address.rpartition(":")
    if not colon or not place or not name:
        bundled = ", ".join(BUNDLED)
        raise WorkloadError(
            f"no workload {address!r}: write module:function, file.py:function, train:CONFIG.toml, train:decoder-tiny, "
            f"or one of the bundled ones ({bundled})."
        )
    module = _import_file(Path(place)) if place.endswith(".py") else _import_module(place)
    function = getattr(module, name, None)
    if not callable(function):
        raise WorkloadError(f"workload {address!r}: {place} has no function {name!r}.")
    return function


def _import_module(name: str) -> Any:
    # A user's own module usually lies in the folder they stand in.
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise WorkloadError(f"cannot import {name!r}: {_describe(error)}.") from error


def _import_file(path: Path) -> Any:
    if not path.is_file():
        raise WorkloadError(f"there is no file {str(path)!r}.")
    module_name = f"redline_workload_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    # So that the file can import its neighbours, as it can when run as a script.
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[module_name]
        raise WorkloadError(f"cannot import {str(path)!r}: {_describe(error)}.") from error
    return module

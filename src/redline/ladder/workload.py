"""A workload: the model and inputs to run, and the gates that judge the output.

    def mine() -> Workload:
        return Workload(build=MyModel, inputs=lambda seed: torch.randn(8, 3, 224, 224))

`build` and `inputs` are called with the chosen device as torch's default device and with torch's random seed set. So
plain `torch.randn(...)` creates tensors on the right device, and every process builds the same model and inputs.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from redline.errors import RedlineError, WorkloadError
from redline.ladder.gate import INFERENCE_GATES, TRAINING_GATES, Gate
from redline.machine.trees import tree_leaves

Inputs = Any  # a tensor, a tuple (positional) or a dict (by name)
OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
LossFunction = Callable[[Any, Inputs], Tensor]
# The batches for calibration. Judging uses other seeds, so that no rung is judged on its calibration data.
SAMPLE_SEEDS = (100, 101, 102, 103)


def call(model: Callable[..., Any], inputs: Inputs) -> Any:
    """Calls a model with a batch: a dict by name, a tuple or list by position, anything else as the only argument."""
    if isinstance(inputs, dict):
        return model(**inputs)
    if isinstance(inputs, (tuple, list)):
        return model(*inputs)
    return model(inputs)


@dataclass(frozen=True)
class Workload:
    """What to run, and how to judge it; with `loss` and `optimizer` one step is a whole training step.

    `items` and `unit` say what a step processes (8 images, for example), which gives the throughput.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[int], Inputs]
    gates: tuple[Gate, ...] = ()
    step: Callable[[Callable[..., Any], Inputs], Any] = call
    loss: LossFunction | None = None
    optimizer: OptimizerFactory | None = None
    items: float = 1.0
    unit: str = "call"
    # Whether inputs are in host memory; each call then copies them to the device and its output back, as a server does.
    host_inputs: bool = False
    # Whether the optimizer updates fp32 copies of half-precision weights.
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
            raise WorkloadError("step= cannot be combined with loss= and optimizer=, which define the training step.")
        if self.host_inputs and self.loss is not None:
            raise WorkloadError("host_inputs=True is for inference; leave it out of a training workload.")
        if isinstance(self.gates, Gate):
            object.__setattr__(self, "gates", (self.gates,))
        if not self.gates:
            object.__setattr__(self, "gates", TRAINING_GATES if self.training else INFERENCE_GATES)

    @property
    def training(self) -> bool:
        return self.loss is not None

    def with_max_error(self, max_error: float) -> "Workload":
        """Returns this workload with a lower limit on its first gate whose metric is an error; 0 changes nothing."""
        first = next((gate for gate in self.gates if gate.direction == "lower"), None)
        if not max_error or first is None:
            return self
        lower = replace(first, limit=min(first.limit, max_error))
        return replace(self, gates=tuple(lower if gate is first else gate for gate in self.gates))

    def fresh_model(self, device: str) -> nn.Module:
        """Builds the model, always with the same random seed."""
        torch.manual_seed(0)
        try:
            with torch.device(device):
                model = self.build()
        except Exception as error:
            raise WorkloadError(f"{self.label}: build() raised {describe_error(error)}.") from error
        if not isinstance(model, nn.Module):
            raise WorkloadError(f"{self.label}: build() returned {type(model).__name__}, not a torch.nn.Module.")
        return model.to(device).train(self.training)

    def fresh_inputs(self, seed: int, device: str) -> Inputs:
        """Returns the batch of a seed, on the device or, with `host_inputs`, in host memory."""
        torch.manual_seed(1_000 + seed)
        home = "cpu" if self.host_inputs else device
        try:
            with torch.device(home):
                inputs = self.inputs(seed)
        except Exception as error:
            raise WorkloadError(f"{self.label}: inputs({seed}) raised {describe_error(error)}.") from error
        for leaf in tree_leaves(inputs):
            if isinstance(leaf, Tensor) and leaf.device.type != torch.device(home).type:
                raise WorkloadError(
                    f"{self.label}: inputs({seed}) holds a tensor on {leaf.device} while the model runs on {home}; "
                    "build it without device=, or set host_inputs=True if it should start in host memory."
                )
        return inputs

    @property
    def label(self) -> str:
        return self.name or self.address or "workload"


def describe_error(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    if isinstance(error, RedlineError) and text:
        return f'"{text[0].rstrip(".")}"'
    return f"{type(error).__name__}: {text[0].rstrip('.') if text else 'no message'}"

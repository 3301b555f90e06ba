"""A job: a private copy of the model, settings for its calls and, for training, the loss and the optimizer.

Each rung takes a job and returns a new job. The user's model is copied once, when the job is created, so a rung may
change `job.model` freely.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from redline.ladder.gate import INFERENCE_GATES, TRAINING_GATES, Gate
from redline.ladder.workload import Inputs, LossFunction, OptimizerFactory, Workload, call
from redline.machine.trees import tree_map_only

Context = Callable[[], AbstractContextManager[Any]]
Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]
_HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class CallState:
    """The buffers and attributes that a call of the model changes, and the random operations that it runs, by name."""

    kept: tuple[str, ...] = ()
    random: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = [f"keeps state between calls ({_listed(self.kept)})"] if self.kept else []
        parts += [f"is random ({_listed(self.random)})"] if self.random else []
        return f"the model {' and '.join(parts)}" if parts else ""


@dataclass(frozen=True)
class Job:
    """A model with everything that rungs need to know. Created with `Job.of(model, …)`; rungs return a changed copy."""

    model: nn.Module
    # Real inputs, which rungs use to calibrate, to find shapes, and to check for overflow.
    samples: tuple[Inputs, ...] = ()
    gates: tuple[Gate, ...] = ()
    # The state and the random operations that affect the output besides the input; None if not examined.
    state: CallState | None = None
    # The untouched model's outputs for the samples, set while a plan is built if a rung has `checks_gates`.
    expected: tuple[Any, ...] = ()
    loss: LossFunction | None = None
    optimizer: OptimizerFactory | None = None
    # Takes a new optimizer and returns the object that scales the loss (see the rung grad_scaler).
    scaler: Callable[[torch.optim.Optimizer], Any] | None = None
    # Context managers entered around every call, which set flags and restore them.
    contexts: tuple[Context, ...] = ()
    # Functions that wrap the model's call or the training step, innermost first.
    wrappers: tuple[Wrapper, ...] = ()
    # The precision of most of the arithmetic; selects the measured peak rate that a measurement is compared with.
    precision: str = "fp32"
    host_inputs: bool = False
    master_weights: bool = False
    # The maximum norm of the gradients: a training step clips them after unscaling; None disables clipping.
    clip_norm: float | None = None
    # The trainable parameters by their names in the user's model, even if rungs have wrapped the model.
    parameters: Mapping[str, nn.Parameter] = field(default_factory=dict)
    # Data that rungs store for their `proof`, by rung name.
    evidence: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        model: nn.Module,
        samples: tuple[Inputs, ...] = (),
        gates: tuple[Gate, ...] = (),
        loss: LossFunction | None = None,
        optimizer: OptimizerFactory | None = None,
        host_inputs: bool = False,
        share: bool = False,
        master_weights: bool = False,
    ) -> "Job":
        """Copies the model with its weights; with `share=True` uses the model itself."""
        own = model if share else copy.deepcopy(model)
        gates = gates or (TRAINING_GATES if loss is not None else INFERENCE_GATES)
        return cls(
            own,
            samples=samples,
            gates=gates,
            loss=loss,
            optimizer=optimizer,
            host_inputs=host_inputs,
            master_weights=master_weights,
            precision=_weights_precision(own),
            parameters={name: p for name, p in own.named_parameters() if p.requires_grad},
        )

    @classmethod
    def of_workload(cls, workload: Workload, model: nn.Module, samples: tuple[Inputs, ...] = ()) -> "Job":
        """Creates the job for a model that the workload built; the model is not copied."""
        return cls.of(
            model,
            samples,
            workload.gates,
            workload.loss,
            workload.optimizer,
            workload.host_inputs,
            share=True,
            master_weights=workload.master_weights,
        )

    @property
    def training(self) -> bool:
        return self.loss is not None

    @property
    def device(self) -> torch.device:
        tensor = next(self.model.parameters(), None)
        if tensor is None:
            tensor = next(self.model.buffers(), None)
        return tensor.device if tensor is not None else torch.device("cpu")

    @property
    def mostly(self) -> str:
        """The kind of layer that holds most weights: "convolution", "matmul", or "" if there is neither."""
        counts = {"convolution": 0, "matmul": 0}
        for module in self.model.modules():
            if isinstance(module, nn.modules.conv._ConvNd):
                counts["convolution"] += module.weight.numel()
            elif isinstance(module, (nn.Linear, nn.MultiheadAttention)):
                counts["matmul"] += sum(p.numel() for p in module.parameters(recurse=False))
        return max(counts, key=lambda kind: counts[kind]) if any(counts.values()) else ""

    def with_evidence(self, rung: str, evidence: Any) -> "Job":
        return replace(self, evidence={**self.evidence, rung: evidence})

    def finish(self) -> "Applied | TrainingStep":
        """Returns the optimized callable."""
        return TrainingStep(self) if self.training else Applied(self)


def _listed(names: Sequence[str]) -> str:
    left = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + left


def _weights_precision(model: nn.Module) -> str:
    """Returns the precision of most weights."""
    counts = {torch.float16: 0, torch.bfloat16: 0}
    others = 0
    for parameter in model.parameters():
        if parameter.dtype in counts:
            counts[parameter.dtype] += parameter.numel()
        else:
            others += parameter.numel()
    half = max(counts, key=lambda dtype: counts[dtype])
    return {torch.float16: "fp16", torch.bfloat16: "bf16"}[half] if counts[half] > others else "fp32"


@contextmanager
def entered(contexts: tuple[Context, ...]) -> Iterator[None]:
    if not contexts:
        yield
        return
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context())
        yield


class Applied(nn.Module):
    """The optimized model for inference; called like the user's model."""

    _function: Callable[..., Any]

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.model = job.model
        self.job = job
        function: Callable[..., Any] = job.model
        if job.host_inputs:
            function = _copying_inputs_and_outputs(function, job.device)
        for wrapper in job.wrappers:
            function = wrapper(function)
        # Bypasses nn.Module.__setattr__, which would register a wrapped module a second time.
        object.__setattr__(self, "_function", _in_contexts(function, job.contexts))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():  # entering no_grad again would cost microseconds
            return self._function(*args, **kwargs)
        with torch.no_grad():
            return self._function(*args, **kwargs)


def _in_contexts(function: Callable[..., Any], contexts: tuple[Context, ...]) -> Callable[..., Any]:
    if not contexts:
        return function

    def run(*args: Any, **kwargs: Any) -> Any:
        with entered(contexts):
            return function(*args, **kwargs)

    return run


def _copying_inputs_and_outputs(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """Copies inputs to the device and outputs back, one after the other; the rung `streams` overlaps these copies."""

    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map_only(Tensor, lambda leaf: leaf.to(device), (args, kwargs))
        return tree_map_only(Tensor, Tensor.cpu, function(*args, **kwargs))

    return run


class TrainingStep:
    """A training step: forward, backward and optimizer step. Returns the detached loss."""

    def __init__(self, job: Job) -> None:
        assert job.loss is not None and job.optimizer is not None
        self.job = job
        self.model = job.model
        trained = [p for p in job.model.parameters() if p.requires_grad]
        # Maps each half-precision weight to its fp32 master weight; half precision would round small updates away.
        self._masters: dict[nn.Parameter, nn.Parameter] = {}
        if job.master_weights:
            self._masters = {p: nn.Parameter(p.detach().float()) for p in trained if p.dtype in _HALVES}
        self.optimizer = job.optimizer([self._masters.get(p, p) for p in trained])
        self.scaler = job.scaler(self.optimizer) if job.scaler is not None else None
        function: Callable[..., Any] = self._step
        for wrapper in job.wrappers:
            function = wrapper(function)
        self._function = function

    def __call__(self, batch: Inputs) -> Tensor:
        with entered(self.job.contexts):
            return self._function(batch)

    def _step(self, batch: Inputs) -> Tensor:
        assert self.job.loss is not None
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.job.loss(call(self.model, batch), batch)
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        for computed, master in self._masters.items():
            master.grad = None if computed.grad is None else computed.grad.float()
            computed.grad = None
        if self.job.clip_norm is not None:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            trained = [p for group in self.optimizer.param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(trained, self.job.clip_norm)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        if self._masters:
            with torch.no_grad():
                torch._foreach_copy_(list(self._masters), list(self._masters.values()))
        return loss.detach()

    @torch.no_grad()
    def restart(self, fresh: nn.Module) -> None:
        """Copies the weights and buffers of the new model `fresh`, and zeros the optimizer state, all in place."""
        for name, weight in fresh.named_parameters():
            if (trained := self.job.parameters.get(name)) is not None:
                for own in (trained, self._masters.get(trained)):
                    if own is not None:
                        own.copy_(weight)
        for own, buffer in zip(self.model.buffers(), fresh.buffers(), strict=False):
            if own.shape == buffer.shape:
                own.copy_(buffer)
        for state in self.optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    value.zero_()
                elif isinstance(value, (int, float)):
                    state[key] = 0

    def gradients(self) -> dict[str, Tensor]:
        """Returns the gradients of the last step, by the user's parameter names."""
        found = {name: self._masters.get(p, p).grad for name, p in self.job.parameters.items()}
        return {name: gradient for name, gradient in found.items() if gradient is not None}

"""fused_optimizer: uses an optimizer implementation that updates many weights with one kernel.

The plain implementation launches several kernels per weight. The rung rebuilds the user's optimizer with the same
class, parameter groups and settings on torch's `fused` or `foreach` implementation, or with the equivalent class of
apex. `auto` uses the best available implementation and writes its name into the saved plan.
"""

import importlib
import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.optimizer import _default_to_fused_or_foreach

from redline.errors import RungError, first_line
from redline.ladder.job import Job
from redline.ladder.rung import Rung, Stage, option
from redline.machine.machine import Machine

_INSTALL_APEX = "apex is not installed: build it from https://github.com/NVIDIA/apex with its CUDA extensions"
# `auto` uses the first of these implementations that works.
_BACKENDS = ("apex", "fused", "foreach", "plain")
_FLAGS = {
    "fused": {"fused": True, "foreach": False},
    "foreach": {"fused": False, "foreach": True},
    "plain": {"fused": False, "foreach": False},
}
# The equivalent of each torch class in apex, with the arguments that make the two compute the same.
_APEX = {
    Adam: ("FusedAdam", {"adam_w_mode": False}),
    AdamW: ("FusedAdam", {"adam_w_mode": True}),
    SGD: ("FusedSGD", {}),
}


class _Unsupported(RungError):
    """Raised if the optimizer does not support an implementation; the message says why."""


def rebuild(optimizer: Optimizer, backend: str) -> Optimizer:
    """Returns the same optimizer (class, groups, settings, state) with another implementation."""
    made = _make(optimizer, backend, optimizer.param_groups)
    if optimizer.state:
        saved = optimizer.state_dict()
        for group, fresh in zip(saved["param_groups"], made.param_groups, strict=True):
            group.update({flag: fresh[flag] for flag in _FLAGS["plain"] if flag in fresh})
        made.load_state_dict(saved)
    return made


def _make(optimizer: Optimizer, backend: str, groups: Sequence[Mapping[str, Any]]) -> Optimizer:
    cls = type(optimizer)
    if not hasattr(optimizer, "defaults"):
        raise _Unsupported("it wraps several optimizers, so it cannot be rebuilt as a single fused one")
    target, flags = _apex_class(optimizer) if backend == "apex" else (cls, _FLAGS[backend])
    known = inspect.signature(target.__init__).parameters
    if missing := [flag for flag, wanted in flags.items() if wanted and flag not in known]:
        raise _Unsupported(f"{cls.__name__} has no {missing[0]}= implementation")
    flags = {flag: wanted for flag, wanted in flags.items() if flag in known}
    settings: dict[str, Any] = {k: v for k, v in optimizer.defaults.items() if k in known} | flags
    # Keeps the settings of each group except the implementation flags.
    own = [{k: v for k, v in group.items() if k not in _FLAGS["plain"]} | flags for group in groups]
    try:
        return target(own, **settings)
    except (RuntimeError, ValueError, TypeError) as error:
        raise _Unsupported(f"{cls.__name__} does not support {backend}: {first_line(error)}") from error


def _apex_class(optimizer: Optimizer) -> tuple[Any, dict[str, Any]]:
    cls = type(optimizer)
    if cls not in _APEX:
        raise _Unsupported(f"apex has no equivalent of {cls.__name__}")
    name, flags = _APEX[cls]
    for setting in ("amsgrad", "maximize", "differentiable"):
        if any(group.get(setting) for group in optimizer.param_groups):
            raise _Unsupported(f"apex's {name} does not support {setting}")
    try:
        return getattr(importlib.import_module("apex.optimizers"), name), flags
    except (ImportError, AttributeError) as error:
        raise _Unsupported(_INSTALL_APEX) from error


def why_unsupported(optimizer: Optimizer, backend: str) -> str:
    """Returns why a backend does not work, or an empty string; runs a step on a small weight to find out."""
    if backend == "plain":
        return ""
    example = optimizer.param_groups[0]["params"][0]
    if backend == "apex" and example.device.type != "cuda":
        return "apex supports CUDA devices only"
    weight = nn.Parameter(torch.ones(2, device=example.device, dtype=example.dtype))
    weight.grad = torch.ones_like(weight)
    try:
        _make(optimizer, backend, [{**optimizer.param_groups[0], "params": [weight]}]).step()
    except _Unsupported as error:
        return str(error)
    except (RuntimeError, NotImplementedError) as error:
        cls, where = type(optimizer).__name__, example.device.type
        return f"{cls} cannot step with {backend} on {where}: {first_line(error)}"
    return ""


def fastest_backend(optimizer: Optimizer) -> str:
    return next(backend for backend in _BACKENDS if not why_unsupported(optimizer, backend))


def implementation(optimizer: Optimizer) -> str:
    """Returns the implementation that the optimizer uses; where none is set, the one that torch uses by default."""
    if type(optimizer).__module__.partition(".")[0] == "apex":
        return "apex"
    found = set()
    for group in optimizer.param_groups:
        fused, foreach = group.get("fused"), group.get("foreach")
        if fused is None and foreach is None and "foreach" in group:
            fused, foreach = _default_to_fused_or_foreach(
                group["params"], bool(group.get("differentiable")), use_fused=False
            )
        found.add("fused" if fused else "foreach" if foreach else "plain")
    return " and ".join(sorted(found))


def _optimizer_of(job: Job) -> Optimizer:
    assert job.optimizer is not None
    return job.optimizer([p for p in job.model.parameters() if p.requires_grad])


@dataclass(frozen=True)
class FusedOptimizer(Rung):
    name = "fused_optimizer"
    stage = Stage.STRUCTURE
    summary = "optimizer that updates many weights per kernel (apex, fused, foreach)"
    inference = False

    backend: str = option("auto", "implementation; auto uses the best one available", ("auto", *_BACKENDS))

    @classmethod
    def variants(cls, machine: Machine, training: bool = False) -> tuple[Rung, ...]:
        if not machine.is_cuda:
            return (cls("fused"), cls("foreach"))
        # On a GPU foreach is the default of torch.
        return (cls("apex"), cls("fused")) if machine.has("apex") else (cls("fused"),)

    def why_not(self, machine: Machine, job: Job | None = None) -> str:
        if self.backend == "apex" and not machine.is_cuda:
            return "apex supports CUDA devices only"
        if self.backend == "apex" and not machine.has("apex"):
            return _INSTALL_APEX
        if job is None or job.optimizer is None or self.backend == "auto":
            return ""
        return why_unsupported(_optimizer_of(job), self.backend)

    def resolve(self, job: Job) -> Rung:
        if self.backend != "auto":
            return self
        return FusedOptimizer(fastest_backend(_optimizer_of(job)))

    def apply(self, job: Job) -> Job:
        assert job.optimizer is not None
        factory = job.optimizer
        seen: dict[str, Any] = {}

        def build(parameters: Iterable[nn.Parameter]) -> Optimizer:
            own = factory(parameters)
            seen.update(before=implementation(own), optimizer=rebuild(own, self.backend))
            return seen["optimizer"]

        return replace(job.with_evidence(self.name, seen), optimizer=build)

    def proof(self, job: Job) -> str:
        seen: Mapping[str, Any] = job.evidence[self.name]
        if not seen:
            return ""
        optimizer, before = seen["optimizer"], seen["before"]
        after = implementation(optimizer)
        if before == after:
            return ""
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        cls = type(optimizer).__name__
        return f"{cls} updates {count} weight tensors with its {after} implementation (before: {before})"

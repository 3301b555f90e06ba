"""Builds a model for training: its precision, its plan, and the list of the optimizations that are active."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from redline.errors import RedlineError
from redline.ladder.job import Job, entered
from redline.ladder.plan import Plan
from redline.ladder.plans.choose import choose_plan
from redline.ladder.rung import Stage
from redline.ladder.rungs.fused_ops import FusedOps
from redline.machine.machine import Machine
from redline.machine.meta import meta_device
from redline.training.arithmetic import Arithmetic, WorkingCopy
from redline.training.optimizers import build_optimizer, check_optimizer, describe
from redline.training.precision import resolve_precision, to_fp8, why_no_fp8
from redline.training.text.architecture import LossModule, own_loss
from redline.training.text.config import TextTraining

# `check_machine` builds the model with this vocabulary, because its checks do not depend on the vocabulary.
_ANY_VOCABULARY = 512


@dataclass(frozen=True)
class TrainedModel:
    """`model` holds the trained weights; `forward(inputs)` computes the loss, possibly with a low-precision copy."""

    model: nn.Module
    module: LossModule
    arithmetic: Arithmetic
    forward: Callable[[Mapping[str, Tensor]], Tensor]
    job: Job
    plan: Plan
    precision: str
    fp8_layers: int
    machine: Machine

    def optimizer(self) -> Optimizer:
        assert self.job.optimizer is not None
        # The optimizer updates the trained weights, even if the plan's model computes with a copy of them.
        return self.job.optimizer(self.model.parameters())

    def around(self) -> AbstractContextManager[object]:
        return entered(self.job.contexts)

    def active(self, optimizer: Optimizer, training: TextTraining) -> list[str]:
        """Returns a line of text for every active optimization."""
        loop, data = training.loop, training.data
        lines = [
            f"precision {self.precision}" + (", with fp32 masters" if isinstance(self.arithmetic, WorkingCopy) else "")
        ]
        if self.fp8_layers:
            lines.append(f"fp8 products in {self.fp8_layers} linear layers")
        lines.append(f"optimizer {describe(optimizer)}")
        if loop.optimizer == "muon" and (slow := self.machine.why_slow("bf16", "matmul")):
            lines.append(f"muon always computes in bf16, and {slow}: adamw is faster here")
        for rung in self.plan.rungs:
            # Shows the proof of fused_ops, which needs no training step and says whether there was anything to replace.
            proof = f": {rung.proof(self.job)}" if isinstance(rung, FusedOps) else ""
            lines.append(f"rung {rung}{proof}")
        if not self.plan.rungs:
            lines.append("no plan: `redline climb train:CONFIG` searches for one")
        if training.recall is None:
            lines.append("documents packed without padding, attention masked to each document")
        if data.accumulate > 1:
            lines.append(f"gradients of {data.accumulate} batches accumulated in fp32")
        if loop.ema_decay:
            lines.append(f"averaged weights (EMA), decay {loop.ema_decay:g}")
        if loop.z_loss:
            lines.append(f"z-loss {loop.z_loss:g}")
        if loop.short_warmup_error:
            lines.append(loop.short_warmup_error.removesuffix(": set fewer.") + ", so the full rate is never reached")
        if self.machine.is_cuda and loop.deterministic:
            lines.append("deterministic kernels (deterministic = false may be faster)")
        elif self.machine.is_cuda:
            lines.append("non-deterministic kernels: losses after a resume may differ in the last bits")
        return lines


def plan_of(training: TextTraining, machine: Machine) -> Plan:
    """Returns the plan in the config, or the bundled plan for this kind of machine if the config has none."""
    return choose_plan("train", machine, given=training.loop.applied_plan if training.loop.plan else None).plan


def check_machine(training: TextTraining, device: torch.device) -> None:
    """Raises for a config that this machine cannot run, before anything is read or written."""
    machine = Machine.detect(str(device))
    if training.loop.asked_precision == "fp8" and (reason := why_no_fp8(machine)):
        raise RedlineError(f'precision = "fp8" cannot be used here: {reason}.')
    plan = plan_of(training, machine)
    # The meta device allocates nothing, so the plan and the optimizer can be checked before any text is read.
    with meta_device():
        module = LossModule(training.model, training.model.build(_ANY_VOCABULARY), training.loop.z_loss)
    check_optimizer(module, training.loop)
    job = Job.of(module, loss=own_loss, optimizer=lambda _: build_optimizer(module, training.loop), share=True)
    for rung in plan.rungs:
        if reason := rung.why_not(machine) or (rung.why_not(machine, job) if rung.stage is Stage.COMPILE else ""):
            raise RedlineError(f"{rung.name} in the plan cannot be used here: {reason}.")


def make_trained_model(
    training: TextTraining, vocabulary: int, device: torch.device, samples: tuple[Any, ...] = ()
) -> TrainedModel:
    """Builds the model with random weights that depend on the seed only, not on the device."""
    check_machine(training, device)
    machine = Machine.detect(str(device))
    with torch.random.fork_rng([]):
        torch.manual_seed(training.loop.seed)
        model = training.model.build(vocabulary)
    model = model.to(device).train()
    precision = resolve_precision(training.loop.asked_precision, device)
    arithmetic = Arithmetic() if precision == "fp32" else WorkingCopy(model, precision)
    computing = arithmetic.model if isinstance(arithmetic, WorkingCopy) else model
    fp8_layers = to_fp8(computing) if precision == "fp8" else 0
    module = LossModule(training.model, computing, training.loop.z_loss)
    weights = {id(weight) for weight in module.parameters()}
    job = Job.of(module, samples, loss=own_loss, optimizer=lambda _: build_optimizer(model, training.loop), share=True)
    plan, job = plan_of(training, machine).build(
        replace(job, precision="bf16" if precision == "fp8" else precision), machine
    )
    if {id(weight) for weight in module.parameters()} != weights:
        raise RedlineError(f"the plan {plan} replaces parameters, which training must keep: remove that rung.")

    def call(inputs: Mapping[str, Tensor]) -> Tensor:
        return job.model(**inputs)

    forward: Callable[..., Any] = call
    for wrapper in job.wrappers:
        forward = wrapper(forward)
    return TrainedModel(model, module, arithmetic, forward, job, plan, precision, fp8_layers, machine)

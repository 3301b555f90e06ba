"""A model made ready to be trained: in its precision, under its plan, with everything that is on said aloud."""

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
from redline.ladder.rung import Rung, Stage
from redline.ladder.rungs.fused_ops import FusedOps
from redline.machine.machine import Machine
from redline.training.arithmetic import Arithmetic
from redline.training.fp8 import to_fp8, why_no_fp8
from redline.training.optimizers import build_optimizer, check_optimizer, describe
from redline.training.precision import resolve_precision
from redline.training.text.config import AUTO, TextTraining
from redline.training.text.loss_module import LossModule, own_loss
from redline.training.working_copy import WorkingCopy

# A model's form depends on none.
_ANY_VOCABULARY = 512


@dataclass(frozen=True)
class Trainee:
    """`model` holds the weights that are trained; `forward(inputs)` gives the loss by those that are computed with."""

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
        # Over the weights that are trained, whichever ones the plan's model computes with.
        return self.job.optimizer(self.model.parameters())

    def around(self) -> AbstractContextManager[object]:
        return entered(self.job.contexts)

    def _rung(self, rung: Rung) -> str:
        # The one that may find nothing to do here, and knows so before a step.
        return f"rung {rung}: {rung.proof(self.job)}" if isinstance(rung, FusedOps) else f"rung {rung}"

    def active(self, optimizer: Optimizer, training: TextTraining) -> list[str]:
        """Every optimization that is on, a line each."""
        loop, data = training.loop, training.data
        said = [
            f"precision {self.precision}" + (", with fp32 masters" if isinstance(self.arithmetic, WorkingCopy) else "")
        ]
        if self.fp8_layers:
            said.append(f"fp8 products in {self.fp8_layers} linear layers")
        said.append(f"optimizer {describe(optimizer)}")
        if loop.optimizer == "muon" and (slow := self.machine.why_slow("bf16", "matmul")):
            said.append(f"muon computes in bf16, whatever the precision, and {slow}: adamw is faster here")
        said += [self._rung(rung) for rung in self.plan.rungs] or [
            "no plan: `redline climb train:CONFIG` looks for one"
        ]
        if training.recall is None:
            said.append("documents packed without padding, attention kept inside each")
        if data.accumulate > 1:
            said.append(f"gradients of {data.accumulate} batches added up in fp32")
        if loop.ema_decay:
            said.append(f"weights averaged, decay {loop.ema_decay:g}")
        if loop.z_loss:
            said.append(f"z-loss {loop.z_loss:g}")
        if loop.never_warm:
            said.append(loop.never_warm.removesuffix(": write fewer.") + ", so the learning rate is never reached")
        if self.machine.is_cuda and loop.deterministic:
            said.append("kernels that give the same numbers every time (deterministic = false may be faster)")
        elif self.machine.is_cuda:
            said.append("the fastest kernels: resumed losses may differ in their last bits (deterministic = false)")
        return said


def plan_of(training: TextTraining, machine: Machine) -> Plan:
    """The settings' own, else the one that is shipped for this kind of machine."""
    return choose_plan("train", machine, given=training.loop.applied_plan if training.loop.plan else None).plan


def check_machine(training: TextTraining, device: torch.device) -> None:
    """Refuses what this machine cannot do, before anything is read or written."""
    machine = Machine.detect(str(device))
    if training.loop.asked_precision == "fp8" and (reason := why_no_fp8(machine)):
        raise RedlineError(f'precision = "fp8" cannot be had here: {reason}.')
    plan = plan_of(training, machine)
    # Of the model's form alone, which needs no text yet: what cannot be done with it is known before any is read.
    with torch.device("meta"):
        module = LossModule(training.model, training.model.build(_ANY_VOCABULARY), training.loop.z_loss)
    check_optimizer(module, training.loop)
    job = Job.of(module, loss=own_loss, optimizer=lambda _: build_optimizer(module, training.loop), share=True)
    for rung in plan.rungs:
        if reason := rung.why_not(machine) or (rung.why_not(machine, job) if rung.stage is Stage.COMPILE else ""):
            raise RedlineError(f"the plan's {rung.name} cannot be had here: {reason}.")


def make_trainee(
    training: TextTraining, vocabulary: int, device: torch.device, samples: tuple[Any, ...] = ()
) -> Trainee:
    """Fresh weights by the seed; the same on every device."""
    check_machine(training, device)
    machine = Machine.detect(str(device))
    with torch.random.fork_rng([]):
        torch.manual_seed(training.loop.seed)
        model = training.model.build(vocabulary)
    model = model.to(device).train()
    precision = _resolve(training.loop.asked_precision, machine, device)
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
        raise RedlineError(f"the plan {plan} exchanges weights, and those of a training must stay what they are.")

    def call(inputs: Mapping[str, Tensor]) -> Tensor:
        return job.model(**inputs)

    forward: Callable[..., Any] = call
    for wrapper in job.wrappers:
        forward = wrapper(forward)
    return Trainee(model, module, arithmetic, forward, job, plan, precision, fp8_layers, machine)


def _resolve(asked: str, machine: Machine, device: torch.device) -> str:
    if asked == AUTO:
        return "bf16" if "bf16" in machine.hardware_dtypes and machine.is_cuda else "fp32"
    return resolve_precision(asked, device) if asked in ("bf16", "fp16") else asked

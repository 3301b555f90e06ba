"""Chooses the plan of a stream's model, and applies it to a network."""

from dataclasses import replace

import torch
from torch import nn

from redline.choices import STREAM_PRECISIONS
from redline.errors import RedlineError
from redline.ladder.job import Applied, Job
from redline.ladder.plan import Plan, parse_rung
from redline.ladder.plans import shipped_plan
from redline.ladder.rungs.tf32 import strict_fp32
from redline.ladder.workload import Inputs
from redline.machine.machine import Machine

_PRECISION_RUNGS = ("bf16", "fp16", "autocast", "int8", "fp8", "tf32")


def choose_plan(machine: Machine, precision: str = "auto", given: Plan | None = None) -> Plan:
    """Returns the given plan, or the one shipped for this kind of machine with the requested precision.

    `auto` keeps the shipped precision. Raises RedlineError if the machine does not support the requested one.
    """
    if precision not in STREAM_PRECISIONS:
        raise RedlineError(f"unknown precision {precision!r} (supported: {', '.join(STREAM_PRECISIONS)}).")
    if given is not None:
        if precision != "auto":
            raise RedlineError("--plan includes the precision: leave out --precision or --plan.")
        return given
    plan = shipped_plan("stream", machine)
    if precision == "auto":
        return plan
    for name in _PRECISION_RUNGS:
        plan = plan.without(name)
    if precision == "fp32":
        return plan
    rung = parse_rung(precision)
    if reason := rung.why_not(machine):
        raise RedlineError(f"precision {precision} is not supported here: {reason}.")
    return plan.with_rung(rung)


def apply_plan(plan: Plan, network: nn.Module, device: torch.device, sample: Inputs) -> tuple[Plan, Applied]:
    """Returns the resolved plan (fp16 that would overflow becomes bf16) and the optimized network.

    The network is moved and modified in place. A plan without a precision runs in strict fp32, because torch allows
    TF32 in convolutions by default; the rung `tf32` allows it.
    """
    job = Job.of(network.eval().requires_grad_(False).to(device), (sample,), share=True)
    resolved, job = plan.build(job, Machine.detect(str(job.device)))
    if job.precision == "fp32":
        job = replace(job, contexts=(*job.contexts, strict_fp32))
    applied = job.finish()
    assert isinstance(applied, Applied)
    return resolved, applied

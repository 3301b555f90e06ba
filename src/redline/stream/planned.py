"""A network of a stream under a plan: the plan as it came out, and fp32 that is fp32.

torch lets convolutions round to TF32 unless it is told not to. A plan that is for speed says so (`tf32`); one that
names no precision is what the others are held against, and `--precision fp32` is what a user asks for who has seen
what rounding does.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from redline.job import Applied, Job
from redline.machine import Machine
from redline.plan import Plan
from redline.workload import Inputs


def under_plan(plan: Plan, network: nn.Module, device: torch.device, sample: Inputs) -> tuple[Plan, Applied]:
    """The plan with its choices made (fp16 that would overflow is bf16), and the network, which is handed over."""
    job = Job.of(network.eval().requires_grad_(False).to(device), (sample,), share=True)
    resolved, job = plan.build(job, Machine.detect(str(job.device)))
    if job.precision == "fp32":
        _hear_the_deprecation()
        job = replace(job, contexts=(*job.contexts, strict_fp32))
    applied = job.finish()
    assert isinstance(applied, Applied)
    return resolved, applied


@contextmanager
def strict_fp32() -> Iterator[None]:
    """No TF32 inside; only a switch that is on is touched, and put on again."""
    backends: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn)
    was_on = [backend for backend in backends if backend.allow_tf32]
    for backend in was_on:
        backend.allow_tf32 = False
    try:
        yield
    finally:
        for backend in was_on:
            backend.allow_tf32 = True


def _hear_the_deprecation() -> None:
    """Some releases of torch say once in a process that these switches will go, and have no others that suffice."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        _ = torch.backends.cuda.matmul.allow_tf32

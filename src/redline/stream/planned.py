"""A network of a stream under a plan: the plan as it came out, and fp32 that is fp32.

torch lets convolutions round to TF32 unless it is told not to. A plan that is for speed says so (`tf32`); one that
names no precision is what the others are held against, and `--precision fp32` is what a user asks for who has seen
what rounding does.
"""

from dataclasses import replace

import torch
from torch import nn

from redline.ladder.job import Applied, Job
from redline.ladder.plan import Plan
from redline.ladder.rungs.tf32 import strict_fp32
from redline.ladder.workload import Inputs
from redline.machine.machine import Machine


def apply_plan(plan: Plan, network: nn.Module, device: torch.device, sample: Inputs) -> tuple[Plan, Applied]:
    """The plan with its choices made (fp16 that would overflow is bf16), and the network, which is handed over."""
    job = Job.of(network.eval().requires_grad_(False).to(device), (sample,), share=True)
    resolved, job = plan.build(job, Machine.detect(str(job.device)))
    if job.precision == "fp32":
        job = replace(job, contexts=(*job.contexts, strict_fp32))
    applied = job.finish()
    assert isinstance(applied, Applied)
    return resolved, applied

"""Applies the plan of a stream to a network."""

from dataclasses import replace

import torch
from torch import nn

from redline.errors import RedlineError
from redline.ladder.job import Applied, Job
from redline.ladder.plan import Plan
from redline.ladder.rungs.cuda_graph import CudaGraph
from redline.ladder.rungs.tf32 import strict_fp32
from redline.ladder.workload import Inputs
from redline.machine.machine import Machine


def without_cuda_graphs(plan: Plan, device: torch.device) -> Plan:
    """Removes CUDA graphs from a plan, because the engine captures the whole frame as one graph."""
    if device.type == "cuda" and "onnxruntime" in plan:
        raise RedlineError("onnxruntime cannot be captured in a CUDA graph: choose another plan on a GPU.")
    if device.type != "cuda" and "cuda_graph" in plan:
        raise RedlineError("the plan's cuda_graph needs a CUDA device.")
    beside = [CudaGraph().adjust_other(rung) for rung in plan.rungs if rung.name != "cuda_graph"]
    return Plan.of([rung for rung in beside if rung is not None])


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

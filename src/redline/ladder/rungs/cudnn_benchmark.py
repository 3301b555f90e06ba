"""cudnn_benchmark: cuDNN times its convolution algorithms on the first call with a shape, and keeps the
fastest.

Without it cuDNN picks by a heuristic. The search is paid again for every new input shape and needs work
space, so it suits fixed shapes; the set-up time of the measurement shows what it cost.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from redline.ladder.job import Job
from redline.ladder.rung import Rung, Stage
from redline.machine.machine import Machine


@dataclass
class Seen:
    """What the rung saw: how many convolutions there are, and the calls in which the flag was on."""

    convolutions: int
    calls: int = 0


def _count_convolutions(model: nn.Module) -> int:
    return sum(isinstance(module, _ConvNd) for module in model.modules())


@contextmanager
def _benchmarking(seen: Seen) -> Iterator[None]:
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        seen.calls += torch.backends.cudnn.benchmark
        yield
    finally:
        torch.backends.cudnn.benchmark = before


@dataclass(frozen=True)
class CudnnBenchmark(Rung):
    name: ClassVar[str] = "cudnn_benchmark"
    stage: ClassVar[Stage] = Stage.FLAGS
    summary: ClassVar[str] = "cuDNN times its convolution algorithms and keeps the fastest"

    @property
    def searches(self) -> bool:
        return True

    def why_not(self, machine: Machine, job: Job | None = None) -> str:
        if not machine.is_cuda:
            return "cuDNN runs on NVIDIA GPUs only"
        if job is not None and not _count_convolutions(job.model):
            return "the model has no convolution"
        return ""

    def apply(self, job: Job) -> Job:
        seen = Seen(_count_convolutions(job.model))
        job = job.with_evidence(self.name, seen)
        return replace(job, contexts=(*job.contexts, partial(_benchmarking, seen)))

    def proof(self, job: Job) -> str:
        seen: Seen = job.evidence[self.name]
        if not (seen.calls and seen.convolutions):
            return ""
        return f"cudnn.benchmark was on in {seen.calls} call(s), for {seen.convolutions} convolution(s)"

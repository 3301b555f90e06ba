"""cudnn_benchmark: lets cuDNN time its convolution algorithms and use the fastest (`torch.backends.cudnn.benchmark`).

By default cuDNN chooses by a heuristic. The search runs at the first call with each input shape and needs workspace
memory, so the flag suits models with fixed shapes. The measured set-up time includes the search.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from redline.ladder.job import Job
from redline.ladder.rung import Rung, Stage
from redline.machine.machine import Machine


def _count_convolutions(model: nn.Module) -> int:
    return sum(isinstance(module, _ConvNd) for module in model.modules())


@contextmanager
def _benchmarking(seen: Counter[str]) -> Iterator[None]:
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        seen["calls"] += torch.backends.cudnn.benchmark
        yield
    finally:
        torch.backends.cudnn.benchmark = before


@dataclass(frozen=True)
class CudnnBenchmark(Rung):
    name = "cudnn_benchmark"
    stage = Stage.FLAGS
    summary = "cuDNN times its convolution algorithms and uses the fastest"

    @property
    def autotunes(self) -> bool:
        return True

    def why_not(self, machine: Machine, job: Job | None = None) -> str:
        if not machine.is_cuda:
            return "cuDNN runs on NVIDIA GPUs only"
        if job is not None and not _count_convolutions(job.model):
            return "the model has no convolution"
        return ""

    def apply(self, job: Job) -> Job:
        seen = Counter(convolutions=_count_convolutions(job.model), calls=0)
        return replace(job.with_evidence(self.name, seen), contexts=(*job.contexts, partial(_benchmarking, seen)))

    def proof(self, job: Job) -> str:
        seen: Counter[str] = job.evidence[self.name]
        if not all(seen.values()):
            return ""
        return f"cudnn.benchmark enabled in {seen['calls']} call(s), for {seen['convolutions']} convolution(s)"

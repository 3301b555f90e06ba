"""bf16: converts the weights and activations of the model to bfloat16.

bfloat16 has the range of fp32 with fewer mantissa bits, so values that fit in fp32 do not overflow. The weights are
converted once, whereas `autocast` converts them at every call. Only real floating-point tensors are converted: a
complex buffer, such as rotary embeddings, would lose its imaginary part.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from redline.ladder.job import Job
from redline.ladder.rewrites.io_adapter import Boundary
from redline.ladder.rung import Rung, Stage
from redline.ladder.rungs.fp32_attention import Fp32Attention
from redline.machine.machine import Machine


def convert(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Converts every floating-point weight and buffer to `dtype` in place; each Parameter stays the same object."""

    def to_dtype(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return model._apply(to_dtype)


def count_convertible(model: nn.Module, dtype: torch.dtype) -> int:
    """Returns the number of weights that `convert` would change."""
    return sum(p.numel() for p in model.parameters() if p.is_floating_point() and p.dtype != dtype)


@dataclass(frozen=True)
class HalfPrecision(Rung):
    """Converts the model once, and wraps it in a boundary that accepts fp32 inputs and returns fp32 outputs."""

    stage = Stage.PRECISION
    dtype: ClassVar[torch.dtype]

    def why_not(self, machine: Machine, job: Job | None = None) -> str:
        slow = machine.why_slow(self.name, job.mostly if job is not None else "")
        if slow or job is None or count_convertible(job.model, self.dtype):
            return slow
        return f"all weights of the model are already {self.name}"

    def apply(self, job: Job) -> Job:
        job = job.with_evidence(self.name, count_convertible(job.model, self.dtype))
        return replace(job, model=Boundary(convert(job.model, self.dtype), self.dtype), precision=self.name)

    def proof(self, job: Job) -> str:
        converted = job.evidence[self.name]
        left = sum(p.numel() for p in job.model.parameters() if p.dtype == torch.float32)
        return f"{converted:,} weights converted to {self.name}, {left:,} left in fp32" if converted else ""


@dataclass(frozen=True)
class Bf16(HalfPrecision):
    name = "bf16"
    summary = "weights and activations in bfloat16, converted once"
    dtype = torch.bfloat16
    excludes = frozenset({"fp16", "autocast"})

    def fallbacks(self, verdict: str, training: bool) -> tuple[tuple[Rung, ...], ...]:
        return ((self, Fp32Attention()),) if verdict == "refused" else ()

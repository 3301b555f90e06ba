"""fused_ops: switches Redline's own modules from their plain PyTorch reference to their fused implementation.

The models of Redline are built from modules that have both: the reference is the specification, and the fused
implementation is a Triton kernel on a GPU or torch's fused attention on a CPU. Each module chooses the fastest
implementation that supports its device and dtype. For inference some modules also reorder their weights.

The fused fp32 kernels have fp32 accuracy. To match them, the rung disables TF32 for the convolutions of an fp32 model,
where torch enables it by default; the rung `tf32` enables it again.
"""

from collections import Counter
from dataclasses import dataclass, replace

import torch
from torch import nn

from redline.ladder.job import Job
from redline.ladder.rung import Rung, Stage, option
from redline.ladder.rungs.tf32 import strict_fp32
from redline.machine.machine import Machine
from redline.nn import SwitchableModule


@dataclass(frozen=True)
class FusedOps(Rung):
    name = "fused_ops"
    stage = Stage.STRUCTURE
    summary = "fused kernels in modules that Redline provides (Triton on GPU)"

    pack: bool = option(
        True, "reorder weights for inference into the fastest layout (use false if int8 follows on a GPU)"
    )

    def why_not(self, machine: Machine, job: Job | None = None) -> str:
        if job is not None and not _plain(job.model):
            return "the model has no module with a fused implementation by Redline"
        return ""

    def apply(self, job: Job) -> Job:
        for module in _plain(job.model):
            module.implementation = "auto"
            if self.pack and not job.training:
                module.pack(job.device)
        ready = [m for m in job.model.modules() if isinstance(m, SwitchableModule)]
        if _is_fp32_on_gpu(job):
            job = replace(job, contexts=(*job.contexts, strict_fp32))
        return job.with_evidence(self.name, tuple(ready))

    def proof(self, job: Job) -> str:
        modules: tuple[SwitchableModule, ...] = job.evidence[self.name]
        # Determined here and not in `apply`, because the choice depends on the dtype, which later rungs may change.
        with torch.set_grad_enabled(job.training):
            kinds = Counter((type(module).__name__, module.active_implementation()) for module in modules)
        proof = ", ".join(f"{count} {kind} by {chosen}" for (kind, chosen), count in sorted(kinds.items()))
        return f"{proof}; no TF32" if _is_fp32_on_gpu(job) else proof


def _is_fp32_on_gpu(job: Job) -> bool:
    return job.precision == "fp32" and job.device.type == "cuda"


def _plain(model: nn.Module) -> list[SwitchableModule]:
    return [m for m in model.modules() if isinstance(m, SwitchableModule) and m.implementation == "reference"]

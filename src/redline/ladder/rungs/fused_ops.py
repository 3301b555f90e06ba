"""fused_ops: Redline's own kernels in place of the plain operations, where a model is made of modules that have both.

Its models come with every such operation written out in plain PyTorch, which is the specification. This rung lets each
take the fastest implementation that can run where it is: a Triton kernel on a GPU, torch's fused attention on a CPU.
Some put their weights into another order for it, where nothing else will change them: for inference.

In fp32 the kernels keep fp32's accuracy, so the model's convolutions must not round to TF32 either, which torch allows
them by default. The rung `tf32` allows it.
"""

from collections import Counter
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import nn

from redline.ladder.job import Job
from redline.ladder.rung import Rung, Stage, option
from redline.ladder.rungs.tf32 import strict_fp32
from redline.machine.machine import Machine
from redline.nn import SwitchableModule


@dataclass(frozen=True)
class FusedOps(Rung):
    name: ClassVar[str] = "fused_ops"
    stage: ClassVar[Stage] = Stage.STRUCTURE
    summary: ClassVar[str] = "Redline's own kernels where a model has modules that know them"

    pack: bool = option(True, "for inference, put weights into the order that is fast here; false for int8 on a GPU")

    def why_not(self, machine: Machine, job: Job | None = None) -> str:
        if job is not None and not _plain(job.model):
            return "the model has no module with an implementation of Redline's own to choose"
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
        # Asked now and not before: what can run depends on the dtype that later rungs converted to.
        with torch.set_grad_enabled(job.training):
            kinds = Counter((type(module).__name__, module.active_implementation()) for module in modules)
        proof = ", ".join(f"{count} {kind} by {chosen}" for (kind, chosen), count in sorted(kinds.items()))
        return f"{proof}; no TF32" if _is_fp32_on_gpu(job) else proof


def _is_fp32_on_gpu(job: Job) -> bool:
    return job.precision == "fp32" and job.device.type == "cuda"


def _plain(model: nn.Module) -> list[SwitchableModule]:
    return [m for m in model.modules() if isinstance(m, SwitchableModule) and m.implementation == "reference"]

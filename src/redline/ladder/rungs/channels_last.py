"""channels_last: stores images and the weights of 2-D convolutions in the channels-last memory format (NHWC).

Tensor cores read this layout directly. Every 4-D input is converted on entry, and convolutions preserve the layout.
Model code that calls `.view` on an activation can fail with the new strides; then the trial of this rung fails with
that error.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from redline.ladder.job import Job
from redline.ladder.rewrites.io_adapter import Boundary
from redline.ladder.rung import Rung, Stage
from redline.machine.machine import Machine


def _kernels(model: nn.Module) -> list[Tensor]:
    """Returns the weights of all 2-D convolutions."""
    return [m.weight for m in model.modules() if isinstance(m, (nn.Conv2d, nn.ConvTranspose2d))]


def _is_channels_last(weight: Tensor) -> bool:
    return weight.is_contiguous(memory_format=torch.channels_last)


def _is_layout_independent(weight: Tensor) -> bool:
    """Returns whether the bytes are the same in both layouts: for a 1×1 kernel or a single input channel."""
    return weight.is_contiguous() and _is_channels_last(weight)


@dataclass(frozen=True)
class ChannelsLast(Rung):
    name = "channels_last"
    stage = Stage.LAYOUT
    summary = "channels-last memory format for images and 2-D convolutions"

    def why_not(self, machine: Machine, job: Job | None = None) -> str:
        if job is None:
            return ""
        found = _kernels(job.model)
        if not found:
            return "the model has no 2-D convolution"
        if all(map(_is_channels_last, found)) and not all(map(_is_layout_independent, found)):
            return "all 2-D convolutions are already channels-last"
        return ""

    def apply(self, job: Job) -> Job:
        converted = sum(not _is_channels_last(weight) for weight in _kernels(job.model))
        model = job.model.to(memory_format=torch.channels_last)  # pyrefly: ignore[no-matching-overload]
        boundary = Boundary(model, memory_format=torch.channels_last)
        return replace(job.with_evidence(self.name, converted), model=boundary)

    def proof(self, job: Job) -> str:
        found = _kernels(job.model)
        changed = sum(map(_is_channels_last, found))
        if not changed:
            return ""
        said = f"{changed} of {len(found)} convolutions are channels-last, {job.evidence[self.name]} of them converted"
        alike = sum(map(_is_layout_independent, found))
        return f"{said} ({alike} identical in both layouts)" if alike else said

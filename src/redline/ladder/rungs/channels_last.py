"""channels_last: 2-D convolution weights and pictures stored with the channel fastest, as tensor cores read
them.

Every 4-D input is laid out so on the way in, and convolutions hand the layout on. Code in the model that
calls `.view` on a picture can refuse the new strides; it then raises, and the trial is a row with that
reason.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import nn

from redline.ladder.job import Job
from redline.ladder.rewrites.io_adapter import Boundary
from redline.ladder.rung import Rung, Stage
from redline.machine.machine import Machine


def _convolutions(model: nn.Module) -> list[nn.Conv2d | nn.ConvTranspose2d]:
    return [m for m in model.modules() if isinstance(m, (nn.Conv2d, nn.ConvTranspose2d))]


def _either_way(convolution: nn.Conv2d | nn.ConvTranspose2d) -> bool:
    """A 1×1 kernel, or a single input channel, is the same bytes in both layouts."""
    weight = convolution.weight
    return weight.is_contiguous() and weight.is_contiguous(memory_format=torch.channels_last)


def _is_channels_last(convolution: nn.Conv2d | nn.ConvTranspose2d) -> bool:
    return convolution.weight.is_contiguous(memory_format=torch.channels_last)


@dataclass(frozen=True)
class ChannelsLast(Rung):
    name: ClassVar[str] = "channels_last"
    stage: ClassVar[Stage] = Stage.LAYOUT
    summary: ClassVar[str] = "convolutions and pictures stored channels-last"

    def why_not(self, machine: Machine, job: Job | None = None) -> str:
        if job is None:
            return ""
        found = _convolutions(job.model)
        if not found:
            return "the model has no 2-D convolution"
        if all(map(_is_channels_last, found)) and not all(map(_either_way, found)):
            return "every 2-D convolution is channels-last already"
        return ""

    def apply(self, job: Job) -> Job:
        rearranged = sum(not _is_channels_last(c) for c in _convolutions(job.model))
        model = job.model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        job = job.with_evidence(self.name, rearranged)
        return replace(job, model=Boundary(model, memory_format=torch.channels_last))

    def proof(self, job: Job) -> str:
        found = _convolutions(job.model)
        changed = sum(map(_is_channels_last, found))
        if not changed:
            return ""
        rearranged = job.evidence[self.name]
        said = f"{changed} of {len(found)} convolutions are channels-last, {rearranged} of them rearranged"
        alike = sum(map(_either_way, found))
        return f"{said} ({alike} read the same in both layouts)" if alike else said

"""The interface between the engine and a model, which computes frames at a fixed size and number of steps.

Everything that may change between frames (strength, seed, control, prompt) is read from buffers that keep their
addresses, so that a CUDA graph captured once can be replayed with other settings.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from redline.errors import RedlineError
from redline.ladder.job import Applied, Job
from redline.ladder.plan import Plan
from redline.ladder.rungs.cuda_graph import CudaGraph
from redline.ladder.rungs.tf32 import strict_fp32
from redline.ladder.workload import Inputs
from redline.machine.machine import Machine
from redline.models.samplers import Sampler, StepTable
from redline.stream.settings import Settings


@dataclass(frozen=True)
class ModelControls:
    """The settings that a model supports, and the ranges of their sliders on the page.

    `names` are the names of the first entries of the control vector; these entries range from `minimum` to 1.
    """

    max_steps: int = 8
    names: tuple[str, ...] = ()
    minimum: float = -1.0
    takes_prompt: bool = False


class FrameModel(Protocol):
    name: str
    controls: ModelControls
    plan: Plan

    # `device` is declared as a property, because torch.device has a method `__get__`: type checkers would treat an
    # attribute of this type as a descriptor.
    @property
    def device(self) -> torch.device: ...

    def check(self, settings: Settings) -> None:
        """Raises RedlineError for unsupported settings. May be called from any thread.

        Does work in advance that would otherwise delay a frame, such as encoding the prompt.
        """

    def table(self, settings: Settings) -> StepTable:
        """Returns the sampler's table of timesteps and coefficients for the settings."""
        ...

    def padded_px(self, side_px: int) -> int:
        """Returns the smallest side that the model supports and that is at least this long."""
        ...

    def program(self, steps: int, height: int, width: int) -> "FrameProgram":
        """Returns the computation of a frame for this number of steps and a size that the model supports."""
        ...

    def working_bytes(self, height: int, width: int) -> int:
        """Estimates the memory in bytes for computing a frame, without the weights. Allocates nothing."""
        ...


class FrameProgram:
    """The base class of programs. It holds the sampler's table and the noise in buffers that keep their addresses.

    `shape` is the shape of one noise tensor.
    """

    def __init__(self, model: FrameModel, steps: int, shape: Sequence[int]) -> None:
        self._table = model.table
        self._sampler = Sampler(model.table(Settings(1.0, steps)), model.device)
        self._noise_N = torch.zeros(self._sampler.noises, *shape, device=model.device)
        self._generator = torch.Generator(model.device)
        self._settings: Settings | None = None

    def retune(self, settings: Settings) -> None:
        """Writes the settings into the buffers in CUDA stream order: after pending work, but without waiting for it.

        Frames with the same seed use the same noise, because new noise for each frame would cause flicker.
        """
        before, self._settings = self._settings, settings
        if before is None or before.strength != settings.strength:
            self._sampler.retune(self._table(settings))
        if before is None or before.seed != settings.seed:
            self._generator.manual_seed(settings.seed)
            self._noise_N.normal_(generator=self._generator)

    def run(self, frame: Tensor, previous: Tensor) -> Tensor:
        """Returns the new image, of the frame's shape. Arguments and result are fp32 (1, 3, H, W) in about [-1, 1]."""
        raise NotImplementedError


def copy_async(target: Tensor, values: Tensor) -> None:
    """Copies to the target in stream order, from pinned memory so that the call does not wait for running work."""
    target.copy_(values.pin_memory() if target.is_cuda else values, non_blocking=True)


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

    The network is moved and modified in place. A plan without a precision runs in strict fp32: TF32 in convolutions,
    which torch allows by default, is disabled unless the plan has the rung `tf32`.
    """
    job = Job.of(network.eval().requires_grad_(False).to(device), (sample,), share=True)
    resolved, job = plan.build(job, Machine.detect(str(job.device)))
    if job.precision == "fp32":
        job = replace(job, contexts=(*job.contexts, strict_fp32))
    applied = job.finish()
    assert isinstance(applied, Applied)
    return resolved, applied

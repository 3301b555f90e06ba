"""An LSD with a sampler as the engine runs it: exactly what its training rolls out and judges, one frame at a time.

The noise is the same for every frame of one seed, or the picture would flicker. The U-Net runs under a plan of the
ladder, and what surrounds it in fp32.
"""

import torch
from torch import Tensor

from redline.errors import RedlineError
from redline.ladder.plan import Plan
from redline.ladder.rungs.cuda_graph import CudaGraph
from redline.models.lsd import PREDICTION, PROCESS, Lsd
from redline.models.samplers import SAMPLERS, StepTable, sampler_table
from redline.models.samplers.distilled import MOST_STEPS
from redline.models.samplers.noise_process import STEPS
from redline.stream.memory_check import peak_live_bytes
from redline.stream.planned import apply_plan
from redline.stream.sampled_program import SampledProgram, copy_async
from redline.stream.settings import Settings

# What rungs calibrate on and look for overflows in: any picture of a fair size.
_SAMPLE_PX = 64
CONTROLS = ("Keep darkness", "Keep colour cast")


class LsdFrames:
    """The model is handed over: its weights are moved to the device, and become what the plan makes of them."""

    takes_prompt = False
    # It was trained with shares: how much to keep.
    control_least = 0.0

    def __init__(self, model: Lsd, plan: Plan, device: torch.device | str, sampler: str = "distilled") -> None:
        if sampler not in SAMPLERS:
            raise RedlineError(f"there is no sampler {sampler!r}: choose from {', '.join(SAMPLERS)}.")
        self.device, self.sampler, self.config = torch.device(device), sampler, model.config
        # The first entries of the control vector are what its training taught it.
        self.control_names = CONTROLS[: model.config.control]
        self.most_steps = MOST_STEPS if sampler == "distilled" else 8
        plan = without_cuda_graphs(plan, self.device)
        self.name, self.is_compiled = str(model.config), "compile" in plan
        self.plan, self.network = apply_plan(plan, model, self.device, _sample(model, self.device))
        self._dtype = next(model.parameters()).dtype

    def check(self, settings: Settings) -> None:
        if settings.prompt:
            raise RedlineError("an LSD takes no prompt: leave out --prompt, or give a diffusers pipeline with --model.")
        if len(settings.control) > self.config.control:
            raise RedlineError(
                f"{self.name} takes {self.config.control} numbers of control at the most, not {len(settings.control)}."
            )
        for name, value in zip(self.control_names, settings.control, strict=False):
            if not self.control_least <= value <= 1:
                raise RedlineError(f"control of “{name}” goes from {self.control_least:g} to 1, not to {value:g}.")
        self.table(settings)

    def table(self, settings: Settings) -> StepTable:
        """From pure noise, whatever the strength: it sees the frame beside the noise, and was trained so."""
        return sampler_table(self.sampler, PROCESS, PREDICTION, settings.steps)

    def padded_px(self, side_px: int) -> int:
        return side_px + self.config.padding_px(side_px)

    def program(self, steps: int, height: int, width: int) -> "LsdProgram":
        return LsdProgram(self, steps, height, width)

    def working_bytes(self, height: int, width: int) -> int:
        with torch.device("meta"):
            shadow = Lsd(self.config).to(self._dtype)
            pictures = [torch.empty(1, 3, height, width) for _ in range(3)]
            times = torch.zeros(1, dtype=torch.long)
        kept = sum(picture.nbytes for picture in pictures)
        return kept + peak_live_bytes(lambda: shadow(*pictures, times))


class LsdProgram(SampledProgram):
    """One number of steps at one size: the sampler's table, the noise, the strength and the control vector on the
    device. The strength is how much of the change is shown, and handed on."""

    def __init__(self, frames: LsdFrames, steps: int, height: int, width: int) -> None:
        super().__init__(frames.table, steps, (1, 3, height, width), frames.device)
        self._frames = frames
        entries = frames.config.control
        self._control = torch.zeros(1, entries, device=frames.device) if entries else None
        self._strength = torch.ones(1, device=frames.device)

    def retune(self, settings: Settings) -> None:
        before = self._tuned
        super().retune(settings)
        if self._control is not None and (before is None or before.control != settings.control):
            filled = [*settings.control, *[0.0] * (self._control.shape[1] - len(settings.control))]
            copy_async(self._control, torch.tensor([filled]))
        if before is None or before.strength != settings.strength:
            copy_async(self._strength, torch.tensor([settings.strength]))

    def run(self, frame: Tensor, previous: Tensor) -> Tensor:
        frames = self._frames

        def predict(noisy: Tensor, times: Tensor) -> Tensor:
            # A compiled network is compiled again for every other layout, and a step leaves its network's own.
            noisy = noisy.contiguous() if frames.is_compiled else noisy
            return frames.network(noisy, frame, previous, times, self._control)

        return torch.lerp(frame, self._sampler.sample(predict, self._noise_N, frame), self._strength)


def without_cuda_graphs(plan: Plan, device: torch.device) -> Plan:
    """The engine records the whole frame: a graph inside it would be in the way."""
    if device.type == "cuda" and "onnxruntime" in plan:
        raise RedlineError("onnxruntime cannot be recorded with the rest of a frame: choose another plan on a GPU.")
    if device.type != "cuda" and "cuda_graph" in plan:
        raise RedlineError("the plan's cuda_graph cannot be had here: it needs a CUDA device.")
    beside = [CudaGraph().beside(rung) for rung in plan.rungs if rung.name != "cuda_graph"]
    return Plan.of([rung for rung in beside if rung is not None])


def _sample(model: Lsd, device: torch.device) -> tuple[Tensor | None, ...]:
    generator = torch.Generator(device).manual_seed(0)
    noisy, frame, previous = torch.rand(3, 1, 3, _SAMPLE_PX, _SAMPLE_PX, generator=generator, device=device) * 2 - 1
    control = torch.zeros(1, model.config.control, device=device) if model.config.control else None
    return noisy, frame, previous, torch.tensor([STEPS // 2], device=device), control

"""Adapts an LSD with a sampler to the engine. A frame is computed exactly as in training rollouts and validation.

The U-Net is optimized by a plan of the ladder, and everything else runs in fp32.
"""

import torch
from torch import Tensor

from redline.errors import RedlineError
from redline.ladder.plan import Plan
from redline.machine.meta import meta_device
from redline.models.lsd import PREDICTION, PROCESS, Lsd
from redline.models.samplers import MOST_STEPS, SAMPLERS, STEPS, StepTable, sampler_table
from redline.stream.frame_model import FrameProgram, ModelControls, apply_plan, copy_async, without_cuda_graphs
from redline.stream.memory_check import peak_live_bytes
from redline.stream.settings import Settings

# The size of the sample image that rungs use for calibration and overflow checks.
_SAMPLE_PX = 64
# The names of the first entries of the control vector, as in the training of the bundled LSD.
CONTROL_NAMES = ("Keep darkness", "Keep colour cast")


class LsdFrames:
    """An LSD as a `FrameModel`. Takes ownership of the model: the plan moves and converts its weights in place."""

    def __init__(self, model: Lsd, plan: Plan, device: torch.device | str, sampler: str = "distilled") -> None:
        if sampler not in SAMPLERS:
            raise RedlineError(f"unknown sampler {sampler!r} (supported: {', '.join(SAMPLERS)}).")
        self.device, self.sampler, self.config = torch.device(device), sampler, model.config
        max_steps = MOST_STEPS if sampler == "distilled" else 8
        # The model was trained with control entries from 0 to 1: each is the share of a degradation to keep.
        self.controls = ModelControls(max_steps, CONTROL_NAMES[: model.config.control], minimum=0.0)
        plan = without_cuda_graphs(plan, self.device)
        self.name, self.is_compiled = str(model.config), "compile" in plan
        self.plan, self.network = apply_plan(plan, model, self.device, _sample(model, self.device))
        self._dtype = next(model.parameters()).dtype

    def check(self, settings: Settings) -> None:
        if settings.prompt:
            raise RedlineError("an LSD does not support --prompt: leave it out, or give a diffusers folder as --model.")
        given, most = len(settings.control), self.config.control
        if given > most:
            raise RedlineError(f"{self.name} supports at most {most} control numbers, not {given}.")
        for name, value in zip(self.controls.names, settings.control, strict=False):
            if not self.controls.minimum <= value <= 1:
                raise RedlineError(f"control “{name}” must be from {self.controls.minimum:g} to 1, not {value:g}.")
        self.table(settings)

    def table(self, settings: Settings) -> StepTable:
        """Returns a table that starts from pure noise at any strength: the model gets the frame as a separate input."""
        return sampler_table(self.sampler, PROCESS, PREDICTION, settings.steps)

    def padded_px(self, side_px: int) -> int:
        return side_px + self.config.padding_px(side_px)

    def program(self, steps: int, height: int, width: int) -> "LsdProgram":
        return LsdProgram(self, steps, height, width)

    def working_bytes(self, height: int, width: int) -> int:
        with meta_device():
            model = Lsd(self.config).to(self._dtype)
            images = [torch.empty(1, 3, height, width) for _ in range(3)]
            times = torch.zeros(1, dtype=torch.long)
        inputs_bytes = sum(image.nbytes for image in images)
        return inputs_bytes + peak_live_bytes(lambda: model(*images, times))


class LsdProgram(FrameProgram):
    """The computation for one number of steps at one size.

    The strength interpolates between the frame (0) and the model's output (1). The result is also passed to the
    next frame, as its previous output.
    """

    def __init__(self, frames: LsdFrames, steps: int, height: int, width: int) -> None:
        super().__init__(frames, steps, (1, 3, height, width))
        self._frames = frames
        entries = frames.config.control
        self._control = torch.zeros(1, entries, device=frames.device) if entries else None
        self._strength = torch.ones(1, device=frames.device)

    def retune(self, settings: Settings) -> None:
        before = self._settings
        super().retune(settings)
        if self._control is not None and (before is None or before.control != settings.control):
            filled = [*settings.control, *[0.0] * (self._control.shape[1] - len(settings.control))]
            copy_async(self._control, torch.tensor([filled]))
        if before is None or before.strength != settings.strength:
            copy_async(self._strength, torch.tensor([settings.strength]))

    def run(self, frame: Tensor, previous: Tensor) -> Tensor:
        frames = self._frames

        def predict(noisy: Tensor, times: Tensor) -> Tensor:
            # A sampler step may change the memory layout, and torch.compile would recompile for a new layout.
            noisy = noisy.contiguous() if frames.is_compiled else noisy
            return frames.network(noisy, frame, previous, times, self._control)

        return torch.lerp(frame, self._sampler.sample(predict, self._noise_N, frame), self._strength)


def _sample(model: Lsd, device: torch.device) -> tuple[Tensor | None, ...]:
    generator = torch.Generator(device).manual_seed(0)
    noisy, frame, previous = torch.rand(3, 1, 3, _SAMPLE_PX, _SAMPLE_PX, generator=generator, device=device) * 2 - 1
    control = torch.zeros(1, model.config.control, device=device) if model.config.control else None
    return noisy, frame, previous, torch.tensor([STEPS // 2], device=device), control

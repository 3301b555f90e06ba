"""Trains an LSD in three stages: diffusion, rollouts on its own output as history, and distillation to few steps.

Images are in [-1, 1]. B: clips.
"""

import copy
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from redline.datasets.clips import Clips, Frame, warp
from redline.errors import RedlineError
from redline.models.lsd import PREDICTION, PROCESS, Lsd, save_lsd
from redline.models.samplers import Sampler, noise_process, sampler_table
from redline.training.arithmetic import Arithmetic, WorkingCopy
from redline.training.ema import add_to_average
from redline.training.lsd.loss import corrupted, difference, soft_abs, weights_by_input
from redline.training.lsd.settings import STAGES, LsdTraining
from redline.training.lsd.validation import Restoration, judge, restorer
from redline.training.photos import PhotoTask, folder_name
from redline.training.precision import computing_in
from redline.training.task import settings_except

# The fraction of clips that rollouts restore from pure noise, as in the first sampling step.
_FROM_NOISE = 0.5
_NO_HISTORY = 0.2
_CONTROLLED = 0.3
_NOISIEST = 999
# The factor that scales down the random output layer at the start.
_START = 0.05
_SEED_OF_VALIDATION = 900_001


class StudentTeacher(nn.Module):
    """`student` is trained. `teacher` is a running average of the student's weights, and is fixed during distillation.

    `seconds` is the training time. Both networks are in one module, so that checkpoints contain both.
    """

    seconds: Tensor

    def __init__(self, student: Lsd, has_teacher: bool = True) -> None:
        super().__init__()
        self.student = student
        self.teacher = copy.deepcopy(student).requires_grad_(False) if has_teacher else None
        self.register_buffer("seconds", torch.zeros((), dtype=torch.float64))

    def forward(self, *inputs: Tensor | None) -> Tensor:
        return self.student(*inputs)

    def update_teacher(self, step: int, decay: float) -> None:
        if self.teacher is None:
            return
        add_to_average(list(self.teacher.parameters()), list(self.student.parameters()), decay, step)


@dataclass(frozen=True)
class _Draw:
    """The control vector of a step, and two random generators: of noise (device) and of choices (CPU)."""

    control: Tensor | None
    noise: torch.Generator
    choices: torch.Generator


class LsdTask(PhotoTask):
    """Trains an LSD."""

    unit = "clip"
    card = "lsd-card.md.jinja"
    save = staticmethod(save_lsd)

    def __init__(self, settings: LsdTraining, device: torch.device) -> None:
        super().__init__(settings, device)
        self.clips = Clips(settings.data, device, settings.loop.seed)
        self.crops = self.clips.crops
        data = replace(settings.data, batch=settings.loop.validation_clips, cuts=0.0)
        self.tests = {
            folder: Clips(data, device, _SEED_OF_VALIDATION, photos=folder) for folder in settings.data.validation
        }
        for folder, clips in self.tests.items():
            if clips.crops.pairs.hashes & self.pairs.hashes:
                raise RedlineError(
                    f"the test set {folder!r} contains a training photo: remove it from one of the two folders."
                )
        with torch.random.fork_rng([]):
            torch.manual_seed(settings.loop.seed)
            student = Lsd(settings.model.config)
        _start_near_the_frame(student)
        student.recompute(settings.loop.checkpointing)
        self.networks = StudentTeacher(student, settings.stages.has_teacher).to(device)
        self.model: nn.Module = self.networks.to(memory_format=torch.channels_last)  # pyrefly: ignore[no-matching-overload]
        self._arithmetic = WorkingCopy(self.networks, "fp16") if self.precision == "fp16" else Arithmetic()
        computing = self._arithmetic.model if isinstance(self._arithmetic, WorkingCopy) else self.networks
        assert isinstance(computing, StudentTeacher)
        self.computing = computing
        if settings.loop.compile:
            for network in computing.children():
                network.compile(fullgraph=True, dynamic=False)
        self._alpha, self._sigma = noise_process(PROCESS).tables(device)
        stages, batch = settings.stages, settings.data.batch
        self._few = [self._sampler("distilled", steps, batch) for steps in range(1, stages.sample_steps + 1)]
        self._many = self._sampler("flow_euler", stages.teacher_steps, batch)
        self._began_s: float | None = None
        self._before_s = 0.0
        self.stage = "diffusion"

    @property
    def averaged(self) -> nn.Module:
        """The student alone, because the teacher is already an average."""
        return self.networks.student

    @property
    def arithmetic(self) -> Arithmetic:
        return self._arithmetic

    @property
    def identity(self) -> Mapping[str, Any]:
        """The settings that must not change on resume; duration, logging, speed and file locations may change."""
        free = {"compile", "checkpointing", "photos", "validation", "weights", "size"}
        free |= {"validation_clips", "validation_frames", "final_frames"}
        settings = settings_except(free, self.settings.data, self.settings.stages, self.settings.loop)
        return {**self.settings.model.config.to_dict(), **settings, **self.photos_identity}

    def loss(self, step: int, part: int = 0) -> Tensor:
        stages = self.settings.stages
        self.stage = stages.at(self._progress(step))
        if self.stage != "distillation":
            self.networks.update_teacher(step, stages.teacher_decay)
        # These seeds differ from those of the clips, so that the noise of diffusion is independent of the clips.
        seed = self.settings.loop.seed
        generator = torch.Generator(self.device).manual_seed((seed + 101) * 1_000_000_007 + step)
        choices = torch.Generator().manual_seed((seed + 202) * 1_000_000_007 + step)
        with torch.no_grad():
            clip = self.clips.clip(step, 2 if self.stage == "diffusion" else stages.frames)
            frames = list(clip)
            control, keep = self._control(generator)
            draw = _Draw(control, generator, choices)
            targets = [clip.degradation.target(frame.clean, keep) * 2 - 1 for frame in frames]
            seen = [frame.seen * 2 - 1 for frame in frames]
        if self.stage == "diffusion":
            history = self._drop_some_history(targets[0], seen[1], generator)
            times = torch.randint(_NOISIEST + 1, (len(history),), generator=generator, device=self.device)
            output = self._denoise(times, seen[1], history, targets[1], draw)
            return difference(output, targets[1], weights_by_input(seen[1], targets[1]))
        return self._rollout(frames, seen, targets, draw)

    def validate(self, model: nn.Module) -> dict[str, float]:
        """Returns PSNR, gain over the input, warp error with and without history, and drift, for each folder."""
        figures = {}
        for folder, result in self.judge(model, self.settings.loop.validation_frames).items():
            name = Path(folder).name
            for figure in ("psnr_db", "gain_db", "warp_error", "alone_warp_error", "drift_db"):
                figures[f"{name}_{figure}"] = getattr(result, figure)
        return figures

    def judge(self, model: nn.Module, frames: int) -> dict[str, Restoration]:
        """Evaluates in fp32, so that the scores do not depend on the training precision."""
        steps, data = self.settings.stages.sample_steps, self.settings.data
        restore = restorer(model, steps, self.settings.loop.validation_clips, data.frame_px, self.device)
        return {folder: judge(restore, clips.clip(0, frames), steps) for folder, clips in self.tests.items()}

    @property
    def reached(self) -> tuple[str, ...]:
        """The stages up to the current one."""
        return STAGES[: STAGES.index(self.stage) + 1]

    def score_result(self, model: nn.Module) -> tuple[dict[str, Any], dict[str, str]]:
        judged = self.judge(model, self.settings.loop.final_frames)
        scores = {folder_name(folder): seen for folder, seen in judged.items()}
        figures = json.dumps({name: asdict(seen) for name, seen in scores.items()})
        about = {"sample_steps": str(self.settings.stages.sample_steps), "stage": self.stage, "scores": figures}
        return {"scores": scores, "stage": self.stage}, about

    def _rollout(self, frames: list[Frame], seen: list[Tensor], targets: list[Tensor], draw: "_Draw") -> Tensor:
        """Returns the loss of a clip with the model's own output as history. No gradient flows through the history."""
        stages, distils = self.settings.stages, self.stage == "distillation"
        batch, history, losses = len(seen[0]), seen[0], []
        times = torch.randint(_NOISIEST + 1, (batch,), generator=draw.noise, device=self.device)
        from_noise = torch.rand(batch, generator=draw.noise, device=self.device) < _FROM_NOISE
        times = torch.where(from_noise, _NOISIEST, times)
        for index, (frame, image, target) in enumerate(zip(frames, seen, targets, strict=True)):
            weights_B = weights_by_input(image, target)
            given = corrupted(history, stages.corruption if index else 0.0, draw.noise)
            if distils:
                output, handed_on, loss = self._distill(image, given, target, weights_B, draw)
            else:
                output = handed_on = self._denoise(times, image, given, target, draw)
                loss = difference(output, target, weights_B)
            if index and stages.steadiness:
                with torch.no_grad():
                    should = target - warp(targets[index - 1], frame.came_from)
                    moved = warp(history, frame.came_from)
                change = (soft_abs(output - moved - should).mean(1) * frame.known).sum((1, 2))
                loss = loss + stages.steadiness * (weights_B * change / frame.known.sum((1, 2)).clamp_min(1)).mean()
            losses.append(loss)
            history = handed_on.detach().clamp(-1, 1)
        return torch.stack(losses).mean()

    def _distill(
        self, image: Tensor, given: Tensor, target: Tensor, weights_B: Tensor, draw: "_Draw"
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Trains one randomly chosen sampling step on the output of the steps before it.

        Returns the output of that step, the output of the last step, and the loss.
        """
        sampler = self._few[int(torch.randint(len(self._few), (), generator=draw.choices))]
        trained = int(torch.randint(sampler.steps, (), generator=draw.choices))
        noise = [self._noise(image, draw.noise) for _ in range(sampler.steps + 1)]
        state, output = sampler.begin(noise[0], image), image
        for index in range(sampler.steps):
            with torch.set_grad_enabled(index == trained):
                predicted = self._predict(
                    self.computing.student, state.noisy, image, given, sampler.times[index], draw.control
                )
            output = predicted if index == trained else output
            with torch.no_grad():
                state = sampler.step(index, state, predicted.detach(), noise[index + 1])
        assert state.clean is not None
        loss, share = difference(output, target, weights_B), self.settings.stages.teacher_share
        if (teacher := self.computing.teacher) is not None:
            with torch.no_grad():
                taught = self._many.sample(
                    lambda noisy, times: self._predict(teacher, noisy, image, given, times, draw.control),
                    noise[0][None],
                    image,
                )
            loss = (1 - share) * loss + share * difference(output, taught.clamp(-1, 1), weights_B)
        return output, state.clean, loss

    def _denoise(self, times: Tensor, image: Tensor, given: Tensor, target: Tensor, draw: "_Draw") -> Tensor:
        """Adds noise to the target according to `times`, and returns the student's prediction from the noisy target."""
        alpha, sigma = (table[times, None, None, None] for table in (self._alpha, self._sigma))
        noisy = alpha * target + sigma * self._noise(target, draw.noise)
        return self._predict(self.computing.student, noisy, image, given, times, draw.control)

    def _predict(
        self, network: nn.Module, noisy: Tensor, image: Tensor, given: Tensor, times: Tensor, control: Tensor | None
    ) -> Tensor:
        # Always the same memory layout, because a compiled network recompiles for each new layout.
        images = [one.contiguous() for one in (noisy, image, given)]
        # One autocast context per call: autocast caches converted weights, and weights cached under no_grad have no
        # gradients.
        with computing_in(self.precision, self.device):
            return network(*images, times, control).float()

    def _control(self, generator: torch.Generator) -> tuple[Tensor | None, Tensor]:
        """Returns the control vector and its first two entries: the fractions of darkness and colour cast to keep."""
        batch, entries = self.settings.data.batch, self.settings.model.config.control
        keep, chosen = torch.rand(2, batch, 2, generator=generator, device=self.device)
        keep = keep * (chosen[:, :1] < (_CONTROLLED if entries else 0.0))
        return (nn.functional.pad(keep, (0, entries - 2)) if entries else None), keep

    def _drop_some_history(self, history: Tensor, image: Tensor, generator: torch.Generator) -> Tensor:
        """Replaces the history of some clips by the current frame, as at the start of a video."""
        nothing = torch.rand(len(history), 1, 1, 1, generator=generator, device=self.device) < _NO_HISTORY
        return torch.where(nothing, image, history)

    def _noise(self, like: Tensor, generator: torch.Generator) -> Tensor:
        return torch.randn(like.shape, generator=generator, device=self.device)

    def _sampler(self, name: str, steps: int, batch: int) -> Sampler:
        return Sampler(sampler_table(name, PROCESS, PREDICTION, steps), self.device, batch)

    def _progress(self, step: int) -> float:
        """Returns the completed fraction of the training, by steps or by time (including the time before a resume)."""
        loop = self.settings.loop
        if loop.steps is not None:
            return loop.progress(step, 0.0)
        if self._began_s is None:
            self._before_s, self._began_s = float(self.networks.seconds), time.monotonic()
        elapsed_s = self._before_s + time.monotonic() - self._began_s
        for networks in {id(one): one for one in (self.networks, self.computing)}.values():
            networks.seconds.fill_(elapsed_s)
        return loop.progress(step, elapsed_s)


@torch.no_grad()
def _start_near_the_frame(student: Lsd) -> None:
    """Scales down the output layer, so that the untrained model returns nearly the input frame."""
    student.head.weight.mul_(_START)
    nn.init.zeros_(student.head.bias)  # pyrefly: ignore[bad-argument-type]

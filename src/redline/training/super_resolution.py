"""Trains a DRCT on crops of photos with an L1 loss, and scores it on the luma of separate test sets."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from redline.datasets.photo_crops import PhotoCrops
from redline.datasets.photo_pairs import PhotoSettings, hash_of
from redline.errors import RedlineError
from redline.evaluation.super_resolution import Evaluation, bicubic_model, evaluate, find_pairs
from redline.files.limits import NonNegativeFloat, Share
from redline.machine.cuda_graphs import CudaGraphCapturer
from redline.models.drct import Drct, DrctConfig, save_drct
from redline.nn import SwitchableModule
from redline.training.arithmetic import Arithmetic
from redline.training.captured_gradients import CapturedGradients
from redline.training.drct_start import start_as_interpolation, start_from
from redline.training.photos import PhotoTask, PhotoTraining, folder_name
from redline.training.precision import computing_in
from redline.training.settings import LoopSettings, StoredDtype
from redline.training.task import settings_except


@dataclass(frozen=True)
class DrctSettings:
    """The dimensions of the model; its heads and MLP widths follow from the paper's rule.

    `weights` is the dtype in which the result is stored. `start` is a file of initial weights: a DRCT of the same
    dimensions, whose scale may differ.
    """

    scale: int = 4
    groups: int = 3
    width: int = 64
    growth: int = 16
    features: int = 32
    window: int = 16
    weights: StoredDtype = "fp16"
    start: str = ""

    @property
    def config(self) -> DrctConfig:
        return DrctConfig.of(
            self.scale, self.groups, self.width, self.growth, features=self.features, window=self.window
        )


@dataclass(frozen=True)
class DrctLoopSettings(LoopSettings):
    """`compile` compiles the groups. On a GPU, `fused_ops` uses Redline's kernels, and `cuda_graph` captures the
    forward and backward pass as one CUDA graph.

    `frequency_weight` is the weight of an L1 loss on the Fourier transform. It is added to the L1 loss on pixels after
    the fraction `frequency_from` of the training.
    """

    optimizer: Literal["adamw", "adam"] = "adamw"
    precision: Literal["bf16", "fp32"] = "bf16"
    compile: bool = False
    fused_ops: bool = True
    cuda_graph: bool = True
    frequency_weight: NonNegativeFloat = 0.0
    frequency_from: Share = 0.7

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.frequency_weight and self.frequency_from and self.steps is None:
            raise RedlineError(
                "frequency_from is a fraction of the steps: set steps, not minutes, or frequency_from = 0."
            )


@dataclass(frozen=True)
class DrctTraining(PhotoTraining):
    model: DrctSettings  # pyrefly: ignore[bad-override]
    data: PhotoSettings  # pyrefly: ignore[bad-override]
    loop: DrctLoopSettings  # pyrefly: ignore[bad-override]

    def __post_init__(self) -> None:
        if self.data.crop_px % self.model.window:
            crop_px, window = self.data.crop_px, self.model.window
            raise RedlineError(f"crop_px = {crop_px} under [data] must be a multiple of the model's window, {window}.")


# Settings that older checkpoints lack, with the values at which they have no effect.
_ADDED_LATER: dict[str, Any] = {"drawn": 0.0, "vary": 0.0, "renew_steps": 0, "frequency_weight": 0.0}


def frequency_loss(output: Tensor, target: Tensor) -> Tensor:
    """Returns the mean absolute error of the real and imaginary parts of the orthonormal Fourier transform."""
    return torch.view_as_real(torch.fft.rfft2(output.contiguous() - target, norm="ortho")).abs().mean()


class DrctTask(PhotoTask):
    """Trains a DRCT."""

    unit = "image"
    card = "drct-card.md.jinja"
    save = staticmethod(save_drct)

    def __init__(self, settings: DrctTraining, device: torch.device) -> None:
        super().__init__(settings, device)
        # The model is built before the photos are read, so that initial weights of the wrong shape raise at once.
        with torch.random.fork_rng([]):
            torch.manual_seed(settings.loop.seed)
            model = Drct(settings.model.config)
        start_as_interpolation(model)
        start = settings.model.start
        self.start = start_from(model, start) if start else None
        self.crops = PhotoCrops(settings.data, settings.model.scale, device, settings.loop.seed)
        self.tests = {folder: find_pairs(folder) for folder in settings.data.validation}
        self._check_disjoint()
        model = model.to(device)
        self.model: nn.Module = model.to(memory_format=torch.channels_last)  # pyrefly: ignore[no-matching-overload]
        if settings.loop.fused_ops and device.type == "cuda":
            # The automatic choice avoids plain attention, which writes all attention scores to memory, forward and
            # backward.
            for module in model.modules():
                if isinstance(module, SwitchableModule):
                    module.implementation = "auto"
        if settings.loop.compile:
            # All groups have the same shape, so one compilation serves all of them.
            for group in model.layers:
                group.compile()
        self._with_frequencies = False
        self._captured: CapturedGradients | None = None

    @property
    def identity(self) -> Mapping[str, Any]:
        """The settings that must not change on resume; duration, logging, speed and file locations may change."""
        settings = self.settings
        free = {"compile", "fused_ops", "cuda_graph", "photos", "validation", "weights"}
        kept = settings_except(free, settings.model, settings.data, settings.loop)
        # Settings in `_ADDED_LATER` are left out if they have no effect, so that older checkpoints can be resumed.
        unused = {name for name, default in _ADDED_LATER.items() if kept[name] == default}
        unused |= set() if settings.loop.frequency_weight else {"frequency_from"}
        kept = {name: value for name, value in kept.items() if name not in unused}
        # The file of initial weights is identified by its content, not by its path.
        return {**kept, **self.photos_identity, "start": self.start.sha256 if self.start else None}

    def loss(self, step: int, part: int = 0) -> Tensor:
        self._choose_loss(step)
        return self._loss_of(*self.crops.batch(step))

    def backward(self, step: int, part: int, arithmetic: Arithmetic) -> Tensor:
        if not self.settings.loop.cuda_graph or self.device.type != "cuda":
            return super().backward(step, part, arithmetic)
        self._choose_loss(step)
        if self._captured is None:
            self._captured = CapturedGradients(self.model, self._loss_of, CudaGraphCapturer(self.device))
        return self._captured(*self.crops.batch(step))

    def penalties(self, step: int) -> tuple[str, ...]:
        return ("frequencies",) if self._has_frequencies(step) else ()

    def _has_frequencies(self, step: int) -> bool:
        loop = self.settings.loop
        return loop.frequency_weight > 0 and step >= loop.frequency_from * (loop.steps or 0)

    def _choose_loss(self, step: int) -> None:
        """Drops the captured graph when the loss changes: the next step captures another one."""
        if self._with_frequencies != self._has_frequencies(step):
            self._with_frequencies, self._captured = self._has_frequencies(step), None

    def _loss_of(self, small: Tensor, large: Tensor) -> Tensor:
        with computing_in(self.precision, self.device):
            output = self.model(small)
        output = output.float()
        loss = F.l1_loss(output, large)
        if self._with_frequencies:
            loss = loss + self.settings.loop.frequency_weight * frequency_loss(output, large)
        return loss

    def validate(self, model: nn.Module) -> dict[str, float]:
        """Returns the PSNR and SSIM of luma for each test set, by folder name."""
        figures = {}
        for folder, seen in self.evaluate(model).items():
            name = Path(folder).name
            figures |= {f"{name}_psnr_y_db": seen.mean.psnr_y_db, f"{name}_ssim_y": seen.mean.ssim_y}
        return figures

    def evaluate(self, model: nn.Module) -> dict[str, Evaluation]:
        """Evaluates in fp32, so that the scores do not depend on the training precision."""
        scale, window = self.settings.model.scale, self.settings.model.window
        return {folder: evaluate(model, pairs, scale, window, self.device) for folder, pairs in self.tests.items()}

    def score_result(self, model: nn.Module) -> tuple[dict[str, Any], dict[str, str]]:
        scores = self.evaluate(model)
        about = {"scores": json.dumps({folder_name(folder): asdict(seen.mean) for folder, seen in scores.items()})}
        if self.start:
            about["start"] = json.dumps(asdict(self.start))
        scale = self.settings.model.scale
        bicubic = {folder: evaluate(bicubic_model(scale), pairs, scale) for folder, pairs in self.tests.items()}
        return {"scores": scores, "bicubic": bicubic}, about

    def _check_disjoint(self) -> None:
        for folder, pairs in self.tests.items():
            for pair in pairs:
                if hash_of(pair.high) in self.pairs.hashes:
                    raise RedlineError(
                        f"{pair.high.name!r} of the test set {folder!r} is a training photo: remove it from one of the "
                        "two folders."
                    )

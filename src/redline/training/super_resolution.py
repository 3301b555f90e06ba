"""Training a DRCT: crops of photos, absolute error, luma scores on test sets that are never trained on."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from redline.cuda_graphs import CudaGraphCapturer
from redline.datasets.photo_crops import PhotoCrops
from redline.datasets.photo_pairs import PhotoSettings, hash_of
from redline.errors import RedlineError
from redline.evaluation.super_resolution import Evaluation, bicubic_model, evaluate, find_pairs
from redline.files.untrusted import read_toml, reader
from redline.models.drct import Drct, DrctConfig
from redline.nn import SwitchableModule
from redline.training.arithmetic import Arithmetic
from redline.training.interpolating_start import start_as_interpolation
from redline.training.optimizers import build_optimizer
from redline.training.precision import computing_in, resolve_precision
from redline.training.recorded_gradients import RecordedGradients
from redline.training.settings import LoopSettings, choices, fill, sections
from redline.training.starting_weights import StartingWeights, start_from
from redline.training.task import FREE_TO_CHANGE, Task


@dataclass(frozen=True)
class DrctSettings:
    """The model's shape, its heads and MLPs by the paper's rule.

    `weights` is what the result is stored in. `start` is a file of weights to begin with: of a DRCT of the same shape,
    whose scale may be another one.
    """

    scale: int = 4
    groups: int = 3
    width: int = 64
    growth: int = 16
    features: int = 32
    window: int = 16
    weights: str = "fp16"
    start: str = ""

    def __post_init__(self) -> None:
        choices("weights", self.weights, ("fp16", "fp32"))

    @property
    def config(self) -> DrctConfig:
        return DrctConfig.of(
            self.scale, self.groups, self.width, self.growth, features=self.features, window=self.window
        )


@dataclass(frozen=True)
class DrctLoopSettings(LoopSettings):
    """`compile` compiles the groups, which are alike; on a GPU `fused_ops` takes Redline's own kernels, and
    `cuda_graph` records forward and backward as one graph.

    `frequency_weight` is the weight of an L1 loss on the Fourier transform, added to the L1 loss from the share
    `frequency_from` of the training on.
    """

    compile: bool = False
    fused_ops: bool = True
    cuda_graph: bool = True
    frequency_weight: float = 0.0
    frequency_from: float = 0.7

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.frequency_weight < 0:
            raise RedlineError(f"frequency_weight must not be negative, as {self.frequency_weight} is.")
        if not 0 <= self.frequency_from <= 1:
            raise RedlineError(f"frequency_from is a share of the training, from 0 to 1, not {self.frequency_from}.")
        if self.frequency_weight and self.frequency_from and self.steps is None:
            raise RedlineError("frequency_from is a share of the steps: set steps instead of minutes, or set it to 0.")


@dataclass(frozen=True)
class DrctTraining:
    """A whole settings file: [model], [data] and [training]."""

    model: DrctSettings
    data: PhotoSettings
    loop: DrctLoopSettings

    @classmethod
    @reader("settings file")
    def read(cls, path: str | Path, **instead: Any) -> "DrctTraining":
        """The file's settings, with those of `instead` that are not None in place of its own."""
        model, data, loop = sections(read_toml(path, "settings file"), ("model", "data", "training"))
        given = {name: value for name, value in instead.items() if value is not None}
        # A length given on the command line replaces the file's, whichever of the two kinds that is.
        if "steps" in given or "minutes" in given:
            loop = {name: value for name, value in loop.items() if name not in ("steps", "minutes")}
        model |= {name: value for name, value in given.items() if name == "start"}
        data |= {name: value for name, value in given.items() if name in ("photos", "validation")}
        loop |= {name: value for name, value in given.items() if name in ("steps", "minutes")}
        return cls(
            fill(DrctSettings, model, "model"),
            fill(PhotoSettings, data, "data"),
            fill(DrctLoopSettings, loop, "training"),
        )

    def __post_init__(self) -> None:
        if self.data.crop_px % self.model.window:
            raise RedlineError(f"crop_px must be a multiple of the model's window, {self.model.window}.")


# Settings that older checkpoints do not name, with the values that change nothing.
_ADDED_LATER: dict[str, Any] = {"drawn": 0.0, "vary": 0.0, "renew_steps": 0, "frequency_weight": 0.0}


def frequency_loss(output: Tensor, target: Tensor) -> Tensor:
    """Returns the mean absolute error of the real and imaginary parts of the orthonormal Fourier transform."""
    return torch.view_as_real(torch.fft.rfft2(output.contiguous() - target, norm="ortho")).abs().mean()


class DrctTask(Task):
    """What the loop needs to train a DRCT."""

    unit = "picture"

    def __init__(self, settings: DrctTraining, device: torch.device) -> None:
        self.settings, self.device = settings, device
        self.items_per_step = settings.data.batch
        self.precision = resolve_precision(settings.loop.precision, device)
        # Before the photos, which take a while to read: weights that do not fit are said at once.
        with torch.random.fork_rng([]):
            torch.manual_seed(settings.loop.seed)
            model = Drct(settings.model.config)
        start_as_interpolation(model)
        start = settings.model.start
        self.start: StartingWeights | None = start_from(model, start) if start else None
        self.crops = PhotoCrops(settings.data, settings.model.scale, device, settings.loop.seed)
        self.tests = {folder: find_pairs(folder) for folder in settings.data.validation}
        self._refuse_known_pictures()
        model = model.to(device)
        self.model: nn.Module = model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        if settings.loop.fused_ops and device.type == "cuda":
            # Plain attention writes out every score, and once more on the way back.
            for module in model.modules():
                if isinstance(module, SwitchableModule):
                    module.implementation = "auto"
        if settings.loop.compile:
            # Groups are alike, so that one compiled serves all of them.
            for group in model.layers:
                group.compile()
        self._with_frequencies = False
        self._recorded: RecordedGradients | None = None

    @property
    def identity(self) -> Mapping[str, Any]:
        """How long it lasts, what is said on the way and where the photos lie may change when it is resumed."""
        free = {*FREE_TO_CHANGE, "compile", "fused_ops", "cuda_graph", "photos", "validation", "weights"}
        settings = {**asdict(self.settings.model), **asdict(self.settings.data), **asdict(self.settings.loop)}
        # Settings that came later count only where they are used, so that older checkpoints can still be resumed.
        free |= {name for name, default in _ADDED_LATER.items() if settings[name] == default}
        free |= set() if settings["frequency_weight"] else {"frequency_from"}
        kept = {name: value for name, value in settings.items() if name not in free}
        # By what is in the file, wherever it lies.
        start = self.start.sha256 if self.start else None
        return {**kept, "photos": self.crops.pairs.photos, "pixels": self.crops.pairs.pixels, "start": start}

    def optimizer(self) -> Optimizer:
        return build_optimizer(self.model, self.settings.loop)

    def loss(self, step: int, part: int = 0) -> Tensor:
        self._choose_loss(step)
        return self._loss_of(*self.crops.batch(step))

    def backward(self, step: int, part: int, arithmetic: Arithmetic) -> Tensor:
        if not self.settings.loop.cuda_graph or self.device.type != "cuda":
            return super().backward(step, part, arithmetic)
        self._choose_loss(step)
        if self._recorded is None:
            self._recorded = RecordedGradients(self.model, self._loss_of, CudaGraphCapturer(self.device))
        return self._recorded(*self.crops.batch(step))

    def penalties(self, step: int) -> tuple[str, ...]:
        return ("frequencies",) if self._has_frequencies(step) else ()

    def _has_frequencies(self, step: int) -> bool:
        loop = self.settings.loop
        return loop.frequency_weight > 0 and step >= loop.frequency_from * (loop.steps or 0)

    def _choose_loss(self, step: int) -> None:
        """Drops the captured graph when the loss changes: the next step captures another one."""
        if self._with_frequencies != self._has_frequencies(step):
            self._with_frequencies, self._recorded = self._has_frequencies(step), None

    def _loss_of(self, small: Tensor, large: Tensor) -> Tensor:
        with computing_in(self.precision, self.device):
            output = self.model(small)
        output = output.float()
        loss = F.l1_loss(output, large)
        if self._with_frequencies:
            loss = loss + self.settings.loop.frequency_weight * frequency_loss(output, large)
        return loss

    def validate(self, model: nn.Module) -> dict[str, float]:
        """PSNR and SSIM of luma for each test set, by its folder's name."""
        figures = {}
        for folder, seen in self.evaluate(model).items():
            name = Path(folder).name
            figures |= {f"{name}_psnr_y_db": seen.mean.psnr_y_db, f"{name}_ssim_y": seen.mean.ssim_y}
        return figures

    def evaluate(self, model: nn.Module) -> dict[str, Evaluation]:
        """Always in fp32: what is scored is what was learnt, not what rounding leaves of it."""
        scale, window = self.settings.model.scale, self.settings.model.window
        return {folder: evaluate(model, pairs, scale, window, self.device) for folder, pairs in self.tests.items()}

    def evaluate_bicubic(self) -> dict[str, Evaluation]:
        scale = self.settings.model.scale
        return {folder: evaluate(bicubic_model(scale), pairs, scale) for folder, pairs in self.tests.items()}

    def _refuse_known_pictures(self) -> None:
        for folder, pairs in self.tests.items():
            for pair in pairs:
                if hash_of(pair.high) in self.crops.pairs.hashes:
                    raise RedlineError(
                        f"{pair.high.name!r} of the test set {folder!r} is among the photos to train on: "
                        "a score on it would mean nothing."
                    )

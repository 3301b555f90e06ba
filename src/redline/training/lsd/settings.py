"""The config of an LSD training run: [model], [data], [stages] and [training]."""

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from msgspec import Meta

from redline.datasets.clips.settings import ClipSettings
from redline.errors import RedlineError
from redline.files.limits import NonNegativeFloat, PositiveInt, Share
from redline.models.lsd import LsdConfig
from redline.models.samplers import MOST_STEPS
from redline.training.photos import PhotoTraining
from redline.training.settings import LoopSettings, StoredDtype

STAGES = ("diffusion", "rollouts", "distillation")


@dataclass(frozen=True)
class LsdSettings:
    """A model size, and dimensions that override its own. `weights` is the dtype in which the result is stored."""

    size: str = "tiny"
    patch: int | None = None
    width: int | None = None
    multipliers: tuple[int, ...] | None = None
    blocks: int | None = None
    attending: int | None = None
    control: int | None = None
    weights: StoredDtype = "fp16"

    @property
    def config(self) -> LsdConfig:
        own = ("patch", "width", "multipliers", "blocks", "attending", "control")
        given = {name: value for name in own if (value := getattr(self, name)) is not None}
        return replace(LsdConfig.of(self.size), **given)


@dataclass(frozen=True)
class StageSettings:
    """The fraction of the training after which each stage begins (1 means never), and the settings of the stages.

    Training begins with diffusion alone. From `rollouts_from` on, the model restores clips of `frames` frames with its
    own output as history; a fraction `corruption` of the histories is corrupted, and `steadiness` is the weight of a
    penalty on changes of the output where the scene does not change. From `distillation_from` on, the model trains
    samplers of 1 to `sample_steps` steps, on the inputs that each step gets at inference. The teacher, an average of
    the weights before distillation, samples in `teacher_steps` steps. `teacher_share` is the weight of the loss against
    the teacher's output; the loss against the true image has the remaining weight.
    """

    rollouts_from: Share = 0.35
    distillation_from: Share = 0.75
    frames: Annotated[int, Meta(ge=2)] = 4
    sample_steps: Annotated[int, Meta(ge=1, le=MOST_STEPS)] = 2
    teacher_steps: PositiveInt = 6
    teacher_share: Share = 0.25
    teacher_decay: Share = 0.999
    steadiness: NonNegativeFloat = 0.25
    corruption: Share = 0.5

    def __post_init__(self) -> None:
        if self.rollouts_from > self.distillation_from:
            raise RedlineError("rollouts_from under [stages] must not be larger than distillation_from.")

    @property
    def has_teacher(self) -> bool:
        return self.distillation_from < 1 and self.teacher_share > 0

    def at(self, progress: float) -> str:
        """Returns the stage after this fraction of the training."""
        if progress >= self.distillation_from and self.distillation_from < 1:
            return "distillation"
        return "rollouts" if progress >= self.rollouts_from and self.rollouts_from < 1 else "diffusion"


@dataclass(frozen=True)
class LsdLoopSettings(LoopSettings):
    """`compile` compiles the network; `checkpointing` recomputes activations in the backward pass. For large models,
    `adamw8bit` also shrinks the optimizer state to a quarter.

    Validation uses `validation_clips` clips of `validation_frames` frames from each folder. The scores on the result
    page are measured on clips of `final_frames` frames.
    """

    optimizer: Literal["adamw", "adam", "adamw8bit"] = "adamw"
    precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    compile: bool = False
    checkpointing: bool = False
    validation_clips: PositiveInt = 4
    validation_frames: Annotated[int, Meta(ge=4)] = 32
    final_frames: Annotated[int, Meta(ge=4)] = 1000


@dataclass(frozen=True)
class LsdTraining(PhotoTraining):
    model: LsdSettings  # pyrefly: ignore[bad-override]
    data: ClipSettings  # pyrefly: ignore[bad-override]
    stages: StageSettings
    loop: LsdLoopSettings  # pyrefly: ignore[bad-override]

    def __post_init__(self) -> None:
        multiple = self.model.config.multiple_px
        if self.data.frame_px % multiple:
            raise RedlineError(
                f"frame_px = {self.data.frame_px} under [data] must be a multiple of {multiple}, so that frames need "
                "no padding."
            )

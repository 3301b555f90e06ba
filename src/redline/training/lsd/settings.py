"""The settings of an LSD's training: [model], [data], [stages] and [training] of one TOML file."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from redline.datasets.clips.settings import ClipSettings
from redline.errors import RedlineError
from redline.files.untrusted import read_toml, reader
from redline.models.lsd import LsdConfig
from redline.models.samplers.distilled import MOST_STEPS
from redline.training.settings import LoopSettings, choices, fill, sections

STAGES = ("diffusion", "rollouts", "distillation")


@dataclass(frozen=True)
class LsdSettings:
    """A size by its name, and what of it is to be otherwise; `weights` is what the result is stored in."""

    size: str = "tiny"
    patch: int | None = None
    width: int | None = None
    multipliers: tuple[int, ...] | None = None
    blocks: int | None = None
    attending: int | None = None
    control: int | None = None
    weights: str = "fp16"

    def __post_init__(self) -> None:
        choices("weights", self.weights, ("fp16", "fp32"))

    @property
    def config(self) -> LsdConfig:
        own = ("patch", "width", "multipliers", "blocks", "attending", "control")
        given = {name: value for name in own if (value := getattr(self, name)) is not None}
        return replace(LsdConfig.of(self.size), **given)


@dataclass(frozen=True)
class StageSettings:
    """What is learnt when: each stage begins at a share of the whole training, 1 for never.

    Diffusion alone comes first. From `rollouts_from` on, clips of `frames` frames are restored with the model's own
    output as history, which is corrupted in a share `corruption` of them; `steadiness` weighs how much the output may
    change where the scene does not. From `distillation_from` on, what is trained are the few steps that will be taken
    (1 to `sample_steps`), on what they make of noise themselves; a teacher, the average of the weights until then,
    takes `teacher_steps`, and its picture weighs `teacher_share` beside the true one.
    """

    rollouts_from: float = 0.35
    distillation_from: float = 0.75
    frames: int = 4
    sample_steps: int = 2
    teacher_steps: int = 6
    teacher_share: float = 0.25
    teacher_decay: float = 0.999
    steadiness: float = 0.25
    corruption: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.rollouts_from <= self.distillation_from <= 1:
            raise RedlineError("0 ≤ rollouts_from ≤ distillation_from ≤ 1 must hold: they are shares of the training.")
        if self.frames < 2 or self.teacher_steps < 1:
            raise RedlineError("rollouts have two frames or more, and a teacher takes a step at least.")
        if not 1 <= self.sample_steps <= MOST_STEPS:
            raise RedlineError(f"sample_steps is from 1 to {MOST_STEPS}, not {self.sample_steps}.")
        for name in ("teacher_share", "teacher_decay", "corruption"):
            if not 0 <= getattr(self, name) <= 1:
                raise RedlineError(f"{name} is from 0 to 1, not {getattr(self, name)}.")
        if self.steadiness < 0:
            raise RedlineError(f"steadiness must not be negative, as {self.steadiness} is.")

    @property
    def has_teacher(self) -> bool:
        return self.distillation_from < 1 and self.teacher_share > 0

    def at(self, progress: float) -> str:
        """The stage when so much of the training is over."""
        if progress >= self.distillation_from and self.distillation_from < 1:
            return "distillation"
        return "rollouts" if progress >= self.rollouts_from and self.rollouts_from < 1 else "diffusion"


@dataclass(frozen=True)
class LsdLoopSettings(LoopSettings):
    """`compile` compiles the network; `checkpointing` computes activations twice instead of keeping them. What a large
    model needs besides are mostly moments, which `adamw8bit` keeps in a quarter of the memory.

    Judging takes `validation_clips` clips of each folder, `validation_frames` long; what is said of the result on its
    page was seen over `final_frames`.
    """

    optimizers: ClassVar[tuple[str, ...]] = ("adamw", "adam", "adamw8bit")
    precisions: ClassVar[tuple[str, ...]] = ("bf16", "fp16", "fp32")

    compile: bool = False
    checkpointing: bool = False
    validation_clips: int = 4
    validation_frames: int = 32
    final_frames: int = 1000

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.validation_clips < 1 or self.validation_frames < 4 or self.final_frames < 4:
            raise RedlineError("judging takes one clip or more, of four frames or more.")


@dataclass(frozen=True)
class LsdTraining:
    """A whole settings file."""

    model: LsdSettings
    data: ClipSettings
    stages: StageSettings
    loop: LsdLoopSettings

    @classmethod
    @reader("settings file")
    def read(cls, path: str | Path, **instead: Any) -> "LsdTraining":
        """The file's settings, with those of `instead` that are not None in place of its own."""
        model, data, stages, loop = sections(read_toml(path, "settings file"), ("model", "data", "stages", "training"))
        given = {name: value for name, value in instead.items() if value is not None}
        # A length given on the command line replaces the file's, whichever of the two kinds that is.
        if "steps" in given or "minutes" in given:
            loop = {name: value for name, value in loop.items() if name not in ("steps", "minutes")}
        data |= {name: value for name, value in given.items() if name in ("photos", "validation")}
        loop |= {name: value for name, value in given.items() if name in ("steps", "minutes")}
        return cls(
            fill(LsdSettings, model, "model"),
            fill(ClipSettings, data, "data"),
            fill(StageSettings, stages, "stages"),
            fill(LsdLoopSettings, loop, "training"),
        )

    def __post_init__(self) -> None:
        multiple = self.model.config.multiple_px
        if self.data.frame_px % multiple:
            raise RedlineError(f"frame_px must be a multiple of {multiple}, or training would learn from padding.")

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """As JSON can hold it, folders by their names: where they lay is nobody's business."""
        named = {"model": self.model, "data": self.data, "stages": self.stages, "training": self.loop}
        tables = {name: asdict(part) for name, part in named.items()}
        tables["data"]["photos"] = Path(self.data.photos).resolve().name
        tables["data"]["validation"] = [Path(folder).resolve().name for folder in self.data.validation]
        return tables

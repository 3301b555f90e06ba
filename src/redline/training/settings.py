"""The settings that all kinds of training share."""

import math
from dataclasses import dataclass
from typing import Literal

from redline.errors import RedlineError
from redline.files.limits import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Share,
    ShareBelowOne,
)

StoredDtype = Literal["fp16", "fp32"]


@dataclass(frozen=True)
class LoopSettings:
    """The duration, the optimizer and the schedule of training; the same settings for every kind of model.

    `config_fields.decode` enforces the types and limits of the fields; the constructor does not.

    Exactly one of `minutes` and `steps` is set. With `minutes`, the learning rate follows the clock and training takes
    the same time on every machine; with `steps`, it follows the step number. A step whose loss or gradient is not
    finite is skipped; `skip_limit` skipped steps in a row end the run with an error.
    """

    steps: PositiveInt | None = None
    minutes: PositiveFloat | None = None
    optimizer: Literal["adamw", "adam", "adamw8bit", "adafactor", "muon"] = "adamw"
    learning_rate: PositiveFloat = 5e-4
    betas: tuple[ShareBelowOne, ShareBelowOne] = (0.9, 0.99)
    weight_decay: NonNegativeFloat = 0.0
    warmup_steps: NonNegativeInt = 200
    final_share: Share = 0.01
    clip_norm: PositiveFloat = 1.0
    ema_decay: ShareBelowOne = 0.999
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp8"] = "bf16"
    seed: NonNegativeInt = 0
    log_every: PositiveInt = 50
    validate_every: PositiveInt = 2000
    checkpoint_minutes: NonNegativeFloat = 2.0
    keep_checkpoints: PositiveInt = 2
    skip_limit: PositiveInt = 10

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.minutes is None):
            raise RedlineError("set either steps or minutes under [training].")

    def progress(self, step: int, elapsed_s: float) -> float:
        """Returns the completed fraction of the training, from 0 to 1."""
        share = elapsed_s / (60 * (self.minutes or math.inf)) if self.steps is None else step / self.steps
        return min(share, 1.0)

    def rate_factor(self, step: int, elapsed_s: float) -> float:
        """Returns the factor by which this step multiplies the learning rate: a linear warm-up, then a cosine decay."""
        # The warm-up always counts steps: compilation in the first step could take longer than a warm-up in minutes.
        warm = min((step + 1) / (self.warmup_steps + 1), 1.0)
        cosine = (1 + math.cos(math.pi * self.progress(step, elapsed_s))) / 2
        return warm * (self.final_share + (1 - self.final_share) * cosine)

    def left_s(self, step: int, elapsed_s: float, steps_per_s: float) -> float:
        """Returns the estimated seconds until the end."""
        if self.steps is None:
            return max(60 * (self.minutes or 0) - elapsed_s, 0.0)
        return (self.steps - step) / steps_per_s if steps_per_s else math.inf

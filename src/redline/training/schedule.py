"""The learning-rate schedule: a linear warm-up, then a cosine decay over the steps or minutes of the training.

With `minutes`, a training takes the same time on every machine, and the decay is complete after that time. With
`steps`, it takes the same number of steps on every machine.
"""

import math
from dataclasses import dataclass

from redline.training.settings import LoopSettings


@dataclass(frozen=True)
class Schedule:
    steps: int | None
    seconds: float | None
    warmup_steps: int
    final_share: float

    @classmethod
    def of(cls, settings: LoopSettings) -> "Schedule":
        seconds = None if settings.minutes is None else settings.minutes * 60
        return cls(settings.steps, seconds, settings.warmup_steps, settings.final_share)

    def progress(self, step: int, elapsed_s: float) -> float:
        """Returns the share of the training that is done, from 0 to 1."""
        share = step / self.steps if self.steps is not None else elapsed_s / (self.seconds or math.inf)
        return min(share, 1.0)

    def rate(self, step: int, elapsed_s: float) -> float:
        """Returns the factor of the learning rate for this step; steps count from 0."""
        # The warm-up always counts steps: compilation in the first step could take longer than a warm-up in minutes.
        warm = min((step + 1) / (self.warmup_steps + 1), 1.0)
        cosine = (1 + math.cos(math.pi * self.progress(step, elapsed_s))) / 2
        return warm * (self.final_share + (1 - self.final_share) * cosine)

    def left_s(self, step: int, elapsed_s: float, steps_per_s: float) -> float:
        """Estimates the seconds until the end."""
        if self.steps is None:
            return max((self.seconds or 0) - elapsed_s, 0.0)
        return (self.steps - step) / steps_per_s if steps_per_s else math.inf

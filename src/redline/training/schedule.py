"""How long a training lasts, and how its learning rate goes: up over the first steps, then down along a cosine.

Measured in minutes, a training ends when they are over, on whatever machine, with the learning rate where it should be
by then: GPUs are rented by the minute. Measured in steps, it ends in the same place on every machine.
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
        """How much of the training is over, from 0 to 1."""
        share = step / self.steps if self.steps is not None else elapsed_s / (self.seconds or math.inf)
        return min(share, 1.0)

    def rate(self, step: int, elapsed_s: float) -> float:
        """The share of the full learning rate for that step; steps count from 0."""
        # Warming up goes by steps even on the clock: compiling can take longer than it, before the first step is done.
        warm = min((step + 1) / (self.warmup_steps + 1), 1.0)
        cosine = (1 + math.cos(math.pi * self.progress(step, elapsed_s))) / 2
        return warm * (self.final_share + (1 - self.final_share) * cosine)

    def left_s(self, step: int, elapsed_s: float, steps_per_s: float) -> float:
        """Seconds to the end, as things go."""
        if self.steps is None:
            return max((self.seconds or 0) - elapsed_s, 0.0)
        return (self.steps - step) / steps_per_s if steps_per_s else math.inf

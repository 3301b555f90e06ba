"""What may be changed while a stream runs: one immutable snapshot a frame, so that no frame sees half a change."""

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from redline.errors import RedlineError

_MOST_STEPS = 1000
_LONGEST_PROMPT = 2000
_SEEDS = 1 << 63


@dataclass(frozen=True)
class Settings:
    """`strength` says how far the output may go from the input; `control` is whatever vector the model was taught, and
    `prompt` what a model that was taught words shall show."""

    strength: float = 0.5
    steps: int = 1
    seed: int = 0
    control: tuple[float, ...] = ()
    prompt: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.strength <= 1:
            raise RedlineError(f"strength is a number from 0 to 1, not {self.strength}.")
        if not 1 <= self.steps <= _MOST_STEPS or self.steps != int(self.steps):
            raise RedlineError(f"steps is a whole number from 1 to {_MOST_STEPS}, not {self.steps}.")
        if not 0 <= self.seed < _SEEDS or self.seed != int(self.seed):
            raise RedlineError(f"seed is a whole number from 0 to 2^63 − 1, not {self.seed}.")
        if not all(math.isfinite(value) for value in self.control):
            raise RedlineError(f"control is a list of finite numbers, not {list(self.control)}.")
        if not isinstance(self.prompt, str) or len(self.prompt) > _LONGEST_PROMPT:
            raise RedlineError(f"a prompt is a text of at most {_LONGEST_PROMPT:,} characters.")
        # Whole numbers may come as 2.0 from a page's slider.
        for name, value in (("steps", int(self.steps)), ("seed", int(self.seed)), ("strength", float(self.strength))):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "control", tuple(float(value) for value in self.control))


class LiveSettings:
    """Read by the pipeline once a frame; changed from any thread. `check` raises where a model cannot run with them, so
    that a change is refused where it is made, and never met by a frame."""

    def __init__(
        self, settings: Settings | None = None, check: Callable[[Settings], None] = lambda settings: None
    ) -> None:
        self._lock = threading.Lock()
        self._now, self._check = settings or Settings(), check
        check(self._now)

    def now(self) -> Settings:
        return self._now

    def change(self, **changes: Any) -> Settings:
        """All of the changes or, where one of them cannot be, none."""
        names = [field.name for field in fields(Settings)]
        for name in changes:
            if name not in names:
                raise RedlineError(f"{name!r} is no setting of a stream: choose from {', '.join(names)}.")
        with self._lock:
            try:
                changed = replace(self._now, **changes)
            except TypeError as error:
                raise RedlineError(f"{changes} cannot be settings of a stream: {error}.") from error
            self._check(changed)
            self._now = changed
            return changed

"""The settings that may change while a stream runs. Each frame uses one immutable snapshot."""

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
    """`strength` limits how far the output departs from the input, `control` is the model's control vector, and
    `prompt` describes the image to a model with a text encoder."""

    strength: float = 0.5
    steps: int = 1
    seed: int = 0
    control: tuple[float, ...] = ()
    prompt: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.strength <= 1:
            raise RedlineError(f"strength must be a number from 0 to 1, not {self.strength}.")
        if not 1 <= self.steps <= _MOST_STEPS or self.steps != int(self.steps):
            raise RedlineError(f"steps must be a whole number from 1 to {_MOST_STEPS}, not {self.steps}.")
        if not 0 <= self.seed < _SEEDS or self.seed != int(self.seed):
            raise RedlineError(f"seed must be a whole number from 0 to 2^63 − 1, not {self.seed}.")
        if not all(math.isfinite(value) for value in self.control):
            raise RedlineError(f"control must be a list of finite numbers, not {list(self.control)}.")
        if not isinstance(self.prompt, str) or len(self.prompt) > _LONGEST_PROMPT:
            raise RedlineError(f"the prompt must be a text of at most {_LONGEST_PROMPT:,} characters.")
        # The sliders of the page may send whole numbers as 2.0.
        for name, value in (("steps", int(self.steps)), ("seed", int(self.seed)), ("strength", float(self.strength))):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "control", tuple(float(value) for value in self.control))


class LiveSettings:
    """The current settings, read by the pipeline once per frame and changed from any thread.

    `check` raises RedlineError for settings that the model does not support, so that `change` refuses them.
    """

    def __init__(
        self, settings: Settings | None = None, check: Callable[[Settings], None] = lambda settings: None
    ) -> None:
        self._lock = threading.Lock()
        self._now, self._check = settings or Settings(), check
        check(self._now)

    def now(self) -> Settings:
        return self._now

    def change(self, **changes: Any) -> Settings:
        """Applies all changes, or none if one of them is invalid."""
        names = [field.name for field in fields(Settings)]
        for name in changes:
            if name not in names:
                raise RedlineError(f"unknown setting {name!r} (supported: {', '.join(names)}).")
        with self._lock:
            try:
                changed = replace(self._now, **changes)
            except TypeError as error:
                raise RedlineError(f"invalid settings {changes}: {error}.") from error
            self._check(changed)
            self._now = changed
            return changed

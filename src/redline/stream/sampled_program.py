"""What programs that sample from noise have in common: a sampler's table and noise that stay where they are."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from redline.models.samplers import Sampler, StepTable
from redline.stream.settings import Settings


class SampledProgram:
    """`table` makes a sampler's table of settings; `shape` is that of one picture's noise."""

    def __init__(
        self, table: Callable[[Settings], StepTable], steps: int, shape: Sequence[int], device: torch.device
    ) -> None:
        self._table = table
        self._sampler = Sampler(table(Settings(1.0, steps)), device)
        self._noise_N = torch.zeros(self._sampler.noises, *shape, device=device)
        self._generator = torch.Generator(device)
        self._tuned: Settings | None = None

    def retune(self, settings: Settings) -> None:
        """The same seed has the same noise for every frame, or the picture would flicker."""
        before, self._tuned = self._tuned, settings
        if before is None or before.strength != settings.strength:
            self._sampler.retune(self._table(settings))
        if before is None or before.seed != settings.seed:
            self._generator.manual_seed(settings.seed)
            self._noise_N.normal_(generator=self._generator)


def copy_async(place: Tensor, values: Tensor) -> None:
    """Pinned memory lets the copy queue up behind the frames that are running."""
    place.copy_(values.pin_memory() if place.is_cuda else values, non_blocking=True)

"""The base class of programs with a sampler: the sampler's table and the noise, in buffers that keep their
addresses."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from redline.models.samplers import Sampler, StepTable
from redline.stream.settings import Settings


class SampledProgram:
    """`table` returns the sampler's table for settings; `shape` is the shape of one noise tensor."""

    def __init__(
        self, table: Callable[[Settings], StepTable], steps: int, shape: Sequence[int], device: torch.device
    ) -> None:
        self._table = table
        self._sampler = Sampler(table(Settings(1.0, steps)), device)
        self._noise_N = torch.zeros(self._sampler.noises, *shape, device=device)
        self._generator = torch.Generator(device)
        self._settings: Settings | None = None

    def retune(self, settings: Settings) -> None:
        """Updates the buffers. All frames of a seed use the same noise, because new noise would make them flicker."""
        before, self._settings = self._settings, settings
        if before is None or before.strength != settings.strength:
            self._sampler.retune(self._table(settings))
        if before is None or before.seed != settings.seed:
            self._generator.manual_seed(settings.seed)
            self._noise_N.normal_(generator=self._generator)


def copy_async(target: Tensor, values: Tensor) -> None:
    """Copies to the target in stream order. Pinned memory lets the copy be queued without waiting for running work."""
    target.copy_(values.pin_memory() if target.is_cuda else values, non_blocking=True)

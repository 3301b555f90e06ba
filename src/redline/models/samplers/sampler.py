"""Runs a sampler's table on a device, step by step or for a whole frame, without synchronization.

An engine that captures a frame as one CUDA graph calls, with its own static buffers,

    state = sampler.begin(noise[0], image)
    for index in range(sampler.steps):
        output = model(state.noisy, …, sampler.times[index])
        state = sampler.step(index, state, output, noise[min(index + 1, sampler.noises - 1)])

and `state.clean` is the image. `retune` overwrites the table on the device; a captured graph uses the new weights from
the next replay on, including those for the starting image.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from redline.errors import ModelError
from redline.models.samplers.step_table import StepTable


class State(NamedTuple):
    """The noisy image, and the clean image predicted by the last step (None before the first)."""

    noisy: Tensor
    clean: Tensor | None = None


class Sampler:
    """Runs one sampler for a batch of images.

    `times[index]` holds the time steps at which the model is called in step `index`, one for each image of the batch.
    A frame needs `noises` noise images.
    """

    def __init__(self, table: StepTable, device: torch.device | str, batch: int = 1) -> None:
        self.table, self.batch = table, batch
        self.times = torch.zeros(len(table.rows), batch, dtype=torch.long, device=device)
        self._weights = torch.zeros(len(table.rows) + 1, len(table.rows[0]), device=device)
        self.retune(table)

    @property
    def steps(self) -> int:
        return len(self.table.rows)

    @property
    def noises(self) -> int:
        return self.steps if self.table.is_random else 1

    def retune(self, table: StepTable) -> None:
        """Replaces weights and time steps, for another strength or sampler with the same number of steps."""
        if len(table.rows) != self.steps:
            raise ModelError(f"cannot change from {self.steps} to {len(table.rows)} steps: make a new sampler.")
        if (table.looks_back and not self.table.looks_back) or (table.is_random and not self.table.is_random):
            raise ModelError(f"cannot change from {self.table.name} to {table.name}, which needs more images per step.")
        start = (*table.start, *[0.0] * (len(table.rows[0]) - 2))
        weights = torch.tensor((start, *table.rows), dtype=torch.float64).float()
        times = torch.tensor(table.times)[:, None].expand(-1, self.batch).contiguous()
        if self.times.is_cuda:
            # Pinned memory makes the copy asynchronous, queued after the frames that are running.
            weights, times = weights.pin_memory(), times.pin_memory()
        self._weights.copy_(weights, non_blocking=True)
        self.times.copy_(times, non_blocking=True)

    def begin(self, noise: Tensor, image: Tensor | None = None) -> State:
        """Returns the starting state: pure noise, or an image with the noise that the first step expects."""
        if image is None:
            return State(noise)
        return State(self._weights[0, 0] * image + self._weights[0, 1] * noise)

    def step(self, index: int, state: State, output: Tensor, fresh: Tensor | None = None) -> State:
        """Returns the next state, given the model's output for `state.noisy` at `times[index]`."""
        noisy = state.noisy
        from_noisy, from_output, by_noisy, by_clean, by_before, by_fresh = self._weights[index + 1]
        clean = from_noisy * noisy + from_output * output.to(noisy.dtype)
        following = by_noisy * noisy + by_clean * clean
        if self.table.looks_back and state.clean is not None:
            following = following + by_before * state.clean
        if self.table.is_random and index < self.steps - 1:
            if fresh is None:
                raise ModelError(f"{self.table.name} needs fresh noise at every step.")
            following = following + by_fresh * fresh
        return State(following, clean)

    def sample(
        self, predict: Callable[[Tensor, Tensor], Tensor], noise_N: Tensor, image: Tensor | None = None
    ) -> Tensor:
        """Samples a whole frame; `predict(noisy, times)` is the model, `noise_N` holds `noises` noise images."""
        if len(noise_N) < self.noises:
            raise ModelError(f"{self.table.name} needs {self.noises} noise images, not {len(noise_N)}.")
        state = self.begin(noise_N[0], image)
        for index in range(self.steps):
            output = predict(state.noisy, self.times[index])
            state = self.step(index, state, output, noise_N[min(index + 1, self.noises - 1)])
        assert state.clean is not None
        return state.clean

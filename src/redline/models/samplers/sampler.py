"""Runs a sampler's table on a device, step by step or frame by frame, without ever asking the device for a value.

An engine that records a frame as one CUDA graph calls, with its own static buffers,

    state = sampler.begin(noise[0], picture)
    for index in range(sampler.steps):
        output = model(state.noisy, …, sampler.times[index])
        state = sampler.step(index, state, output, noise[min(index + 1, sampler.noises - 1)])

and `state.clean` is the picture. `retune` writes another table over the one on the device: the recorded frame plays
with it from the next replay on. What it starts from follows `retune` too.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from redline.errors import ModelError
from redline.models.samplers.step_table import StepTable


class State(NamedTuple):
    """The noisy picture, and the clean picture that the last step saw (none before the first)."""

    noisy: Tensor
    clean: Tensor | None = None


class Sampler:
    """`times[index]` is a step's time step, once for each picture of the batch; a frame takes `noises` of noise."""

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
        """Other weights and time steps (a strength, another sampler of the same kind) for as many steps."""
        if len(table.rows) != self.steps:
            raise ModelError(f"a sampler of {self.steps} steps cannot become one of {len(table.rows)}.")
        if (table.looks_back and not self.table.looks_back) or (table.is_random and not self.table.is_random):
            raise ModelError(f"{self.table.name} cannot become {table.name}, which takes more pictures a step.")
        start = (*table.start, *[0.0] * (len(table.rows[0]) - 2))
        weights = torch.tensor((start, *table.rows), dtype=torch.float64).float()
        times = torch.tensor(table.times)[:, None].expand(-1, self.batch).contiguous()
        if self.times.is_cuda:
            # Pinned memory lets the copy queue up behind the frames that are running.
            weights, times = weights.pin_memory(), times.pin_memory()
        self._weights.copy_(weights, non_blocking=True)
        self.times.copy_(times, non_blocking=True)

    def begin(self, noise: Tensor, picture: Tensor | None = None) -> State:
        """Noise alone, or a picture with as much noise as the first step expects."""
        if picture is None:
            return State(noise)
        return State(self._weights[0, 0] * picture + self._weights[0, 1] * noise)

    def step(self, index: int, state: State, output: Tensor, fresh: Tensor | None = None) -> State:
        """What the model said of `state.noisy` at `times[index]` makes the next one."""
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
        self, predict: Callable[[Tensor, Tensor], Tensor], noise_N: Tensor, picture: Tensor | None = None
    ) -> Tensor:
        """A whole frame: `predict(noisy, times)` is the model; `noise_N` holds `noises` pictures' worth of noise."""
        if len(noise_N) < self.noises:
            raise ModelError(f"{self.table.name} needs {self.noises} pictures of noise, not {len(noise_N)}.")
        state = self.begin(noise_N[0], picture)
        for index in range(self.steps):
            output = predict(state.noisy, self.times[index])
            state = self.step(index, state, output, noise_N[min(index + 1, self.noises - 1)])
        assert state.clean is not None
        return state.clean

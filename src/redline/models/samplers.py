"""Diffusion samplers: noise processes, four functions that make tables of weights, and one class that runs them.

A noise process gives the weights of image and noise at each of 1,000 time steps. Each step of a sampler is a weighted
sum of up to four images: the noisy image, the model's prediction, the prediction of the previous step, and fresh
noise. A sampler is therefore a table of weights, computed once in double precision and kept on the device. Running it
needs no synchronization, and a change of strength only rewrites the table.

From the noisy image x and the model's output, a step first computes the clean image,

    clean image = from_noisy · x + from_output · output,

then the noisy image of the next step,

    next x = noisy · x + clean · clean image + before · clean image of the previous step + fresh · fresh noise.

The six factors are the fields of `Row`. Each sampler is a function that returns its table.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from redline.errors import ModelError

STEPS = 1000
PROCESSES = ("flow", "scaled_linear", "linear", "cosine")
# What a model can predict: the clean image, the noise, v (v-prediction), or the velocity of a flow.
PREDICTIONS = ("sample", "epsilon", "v", "velocity")
# The largest number of steps of the sampler `distilled`.
MOST_STEPS = 4


@dataclass(frozen=True)
class NoiseProcess:
    """The noisy image at step t is alpha[t] · image + sigma[t] · noise; noise increases with t."""

    name: str
    alpha: tuple[float, ...]
    sigma: tuple[float, ...]

    @property
    def is_flow(self) -> bool:
        return self.name == "flow"

    def log_snr(self, step: int) -> float:
        """Returns log(alpha / sigma), as used by solvers; −∞ for pure noise."""
        alpha, sigma = self.alpha[step], self.sigma[step]
        return math.log(alpha / sigma) if alpha > 0 else -math.inf

    def tables(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Returns alpha and sigma as tensors on a device, indexed by time step."""
        return torch.tensor(self.alpha, device=device), torch.tensor(self.sigma, device=device)


def noise_process(name: str, shift: float = 1.0) -> NoiseProcess:
    """Returns a noise process by name; `shift` above 1 gives a flow more noise, which suits large images.

    `flow` interpolates linearly from image to noise. The others preserve variance (alpha² + sigma² = 1) and use the
    beta schedules of the same names in diffusers.
    """
    if name not in PROCESSES:
        raise ModelError(f"unknown noise process {name!r} (available: {', '.join(PROCESSES)}).")
    if shift != 1.0 and name != "flow":
        raise ModelError(f"shift is only supported by the noise process 'flow', not by {name!r}.")
    if shift <= 0:
        raise ModelError(f"shift must be above zero, not {shift}.")
    if name == "flow":
        straight = torch.arange(1, STEPS + 1, dtype=torch.float64) / STEPS
        sigma = shift * straight / (1 + (shift - 1) * straight)
        alpha = 1 - sigma
    else:
        kept = torch.cumprod(1 - _betas(name), 0)
        alpha, sigma = kept.sqrt(), (1 - kept).sqrt()
    return NoiseProcess(name, tuple(alpha.tolist()), tuple(sigma.tolist()))


def _betas(name: str) -> Tensor:
    first, last = 0.00085, 0.012
    if name == "scaled_linear":
        return torch.linspace(first**0.5, last**0.5, STEPS, dtype=torch.float64) ** 2
    if name == "linear":
        return torch.linspace(0.0001, 0.02, STEPS, dtype=torch.float64)
    time = torch.arange(STEPS + 1, dtype=torch.float64) / STEPS
    kept = torch.cos((time + 0.008) / 1.008 * math.pi / 2) ** 2
    return (1 - kept[1:] / kept[:-1]).clamp(max=0.999)


class Row(NamedTuple):
    from_noisy: float
    from_output: float
    noisy: float
    clean: float
    before: float = 0.0
    fresh: float = 0.0


@dataclass(frozen=True)
class StepTable:
    """The weights of all steps. `start` holds the weights of image and noise in the first noisy image.

    If `looks_back` is set, a step needs the clean image of the previous step; if `is_random` is set, it needs fresh
    noise. Neither depends on the strength, so that a CUDA graph captured for one strength works for every other.
    """

    name: str
    times: tuple[int, ...]
    start: tuple[float, float]
    rows: tuple[Row, ...]
    looks_back: bool = False
    is_random: bool = False


def make_table(
    name: str,
    process: NoiseProcess,
    prediction: str,
    times: tuple[int, ...],
    weights: list[tuple[float, ...]],
    *,
    looks_back: bool = False,
    is_random: bool = False,
) -> StepTable:
    """Builds a table from the weights (noisy, clean, before, fresh) of each step."""
    reading = [clean_weights(process, prediction, time) for time in times]
    rows = tuple(Row(*one, *other) for one, other in zip(reading, weights, strict=True))
    start = (process.alpha[times[0]], process.sigma[times[0]])
    return StepTable(name, times, start, rows, looks_back, is_random)


def clean_weights(process: NoiseProcess, prediction: str, time: int) -> tuple[float, float]:
    """Returns the weights of the noisy image and the model's output that give the clean image."""
    alpha, sigma = process.alpha[time], process.sigma[time]
    if prediction == "sample":
        return 0.0, 1.0
    if prediction == "epsilon":
        if alpha <= 0:
            raise ModelError("a model that predicts noise cannot start from pure noise: use a lower strength.")
        return 1 / alpha, -sigma / alpha
    if prediction == "v" and not process.is_flow:
        return alpha, -sigma
    if prediction == "velocity" and process.is_flow:
        return 1.0, -sigma
    if prediction in PREDICTIONS:
        raise ModelError(f"the noise process {process.name!r} does not support the prediction {prediction!r}.")
    raise ModelError(f"unknown prediction {prediction!r} (available: {', '.join(PREDICTIONS)}).")


def spaced_timesteps(steps: int, strength: float = 1.0) -> tuple[int, ...]:
    """Returns evenly spaced time steps, the noisiest first; with a lower strength the first step has less noise.

    The number of steps does not depend on the strength, so that a captured CUDA graph works for every strength.
    """
    if not 1 <= steps <= STEPS:
        raise ModelError(f"the number of steps must be from 1 to {STEPS}, not {steps}.")
    if not 0 < strength <= 1:
        raise ModelError(f"strength must be above 0 and at most 1, not {strength}.")
    noisiest = strength * STEPS
    times = tuple(max(round(noisiest - index * noisiest / steps) - 1, 0) for index in range(steps))
    if len(set(times)) < steps:
        raise ModelError(f"a strength of {strength} is too low for {steps} distinct time steps.")
    return times


def intervals(times: tuple[int, ...]) -> list[tuple[int, int | None]]:
    """Returns pairs of consecutive time steps; the last is paired with None, which stands for the clean image."""
    check_times(times)
    return list(zip(times, (*times[1:], None), strict=True))


def check_times(times: tuple[int, ...]) -> None:
    if not times or any(not 0 <= time < STEPS for time in times):
        raise ModelError(f"time steps must be from 0 to {STEPS - 1}, not {times}.")
    if any(later >= time for time, later in zip(times, times[1:], strict=False)):
        raise ModelError(f"time steps must decrease, not {times}.")


def ddim(process: NoiseProcess, prediction: str, times: tuple[int, ...]) -> StepTable:
    """Deterministic DDIM (Song, Meng and Ermon, 2021; eta = 0).

    Each step scales the predicted noise down to the noise level of the next step; the last ends at the clean image.
    """
    weights: list[tuple[float, ...]] = []
    for time, later in intervals(times):
        alpha, sigma = process.alpha[time], process.sigma[time]
        next_alpha, next_sigma = (1.0, 0.0) if later is None else (process.alpha[later], process.sigma[later])
        # The predicted noise is (noisy − alpha · clean) / sigma.
        weights.append((next_sigma / sigma, next_alpha - alpha * next_sigma / sigma))
    return make_table("ddim", process, prediction, times, weights)


def dpm_solver(process: NoiseProcess, prediction: str, times: tuple[int, ...]) -> StepTable:
    """DPM-Solver++ 2M (Lu et al., 2022): second-order steps from the predictions of this step and the previous one.

    The first step has no previous prediction, and in the last step, to zero noise, the second-order term is undefined.
    So both steps are of first order, like the steps of DDIM.
    """
    weights: list[tuple[float, ...]] = []
    for index, (time, later) in enumerate(intervals(times)):
        if later is None:
            weights.append((0.0, 1.0))
            continue
        step = process.log_snr(later) - process.log_snr(time)
        towards_clean = -process.alpha[later] * math.expm1(-step)
        back = 0.0
        if index > 0:
            step_before = process.log_snr(time) - process.log_snr(times[index - 1])
            # After a step from pure noise, which is infinitely long in log-SNR, the second-order term vanishes.
            back = 0.0 if math.isinf(step_before) else step / step_before / 2
        noisy = process.sigma[later] / process.sigma[time]
        weights.append((noisy, towards_clean * (1 + back), -towards_clean * back))
    return make_table("dpm_solver", process, prediction, times, weights, looks_back=len(times) > 2)


def flow_euler(process: NoiseProcess, prediction: str, times: tuple[int, ...]) -> StepTable:
    """Flow matching (Lipman et al., 2023): integrates the velocity from noise to image with Euler steps."""
    if not process.is_flow:
        raise ModelError(f"the sampler 'flow_euler' needs the noise process 'flow', not {process.name!r}.")
    weights: list[tuple[float, ...]] = []
    for time, later in intervals(times):
        sigma = process.sigma[time]
        change = (0.0 if later is None else process.sigma[later]) - sigma
        # The velocity is (noisy − clean) / sigma.
        weights.append((1 + change / sigma, -change / sigma))
    return make_table("flow_euler", process, prediction, times, weights)


def distilled(process: NoiseProcess, prediction: str, times: tuple[int, ...]) -> StepTable:
    """Samples a distilled model in one to four steps; fresh noise is added to the predicted image between steps.

    This is consistency sampling (Song et al., 2023; Luo et al., 2023): each step corrects the prediction of the
    previous one, instead of following an ODE trajectory, for which so few steps are too coarse.
    """
    check_times(times)
    if len(times) > MOST_STEPS:
        raise ModelError(f"the sampler 'distilled' supports 1 to {MOST_STEPS} steps, not {len(times)}.")
    weights: list[tuple[float, ...]] = [(0.0, process.alpha[later], 0.0, process.sigma[later]) for later in times[1:]]
    weights.append((0.0, 1.0, 0.0, 0.0))
    return make_table("distilled", process, prediction, times, weights, is_random=len(times) > 1)


_MakeTable = Callable[[NoiseProcess, str, tuple[int, ...]], StepTable]
SAMPLERS: dict[str, _MakeTable] = {make.__name__: make for make in (ddim, dpm_solver, flow_euler, distilled)}


def sampler_table(name: str, process: str, prediction: str, steps: int, strength: float = 1.0) -> StepTable:
    """Returns the table of a sampler by name; a lower `strength` starts with less noise."""
    if name not in SAMPLERS:
        raise ModelError(f"unknown sampler {name!r} (available: {', '.join(SAMPLERS)}).")
    return SAMPLERS[name](noise_process(process), prediction, spaced_timesteps(steps, strength))


class State(NamedTuple):
    """The noisy image, and the clean image predicted by the last step (None before the first)."""

    noisy: Tensor
    clean: Tensor | None = None


class Sampler:
    """Runs one sampler for a batch of images, step by step or for a whole frame, without synchronization.

    An engine that captures a frame as one CUDA graph calls, with its own static buffers,

        state = sampler.begin(noise[0], image)
        for index in range(sampler.steps):
            output = model(state.noisy, …, sampler.times[index])
            state = sampler.step(index, state, output, noise[min(index + 1, sampler.noises - 1)])

    Then `state.clean` is the image. `retune` overwrites the table on the device; a captured graph uses the new weights
    from the next replay on, including those for the starting image.

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
            change = f"cannot change from {self.table.name} to {table.name}"
            raise ModelError(f"{change}, which needs more images per step: make a new sampler.")
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

"""What a sampler is: for each step a time step and a row of weights.

From the noisy picture x and the model's output, a step first reads the clean picture,

    clean = from_noisy · x + from_output · output,

then makes the noisy picture of the next step,

    next = noisy · x + clean · clean + before · clean of the step before + fresh · fresh noise.
"""

from dataclasses import dataclass
from typing import NamedTuple

from redline.errors import ModelError
from redline.models.samplers.noise_process import NoiseProcess
from redline.models.samplers.timesteps import check_times

# What a model's output can be: the clean picture, the noise in it, diffusion's v, or the velocity of a flow.
PREDICTIONS = ("sample", "epsilon", "v", "velocity")


class Row(NamedTuple):
    from_noisy: float
    from_output: float
    noisy: float
    clean: float
    before: float = 0.0
    fresh: float = 0.0


@dataclass(frozen=True)
class StepTable:
    """`start` is how much of a picture and how much noise a frame starts from.

    A table that `looks_back` needs the clean picture of the step before, one that `is_random` fresh noise at each step;
    that is of the sampler's kind, whatever its weights are, so that a recorded frame fits every strength.
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
    """Weights of (noisy, clean, before, fresh) for each step, with what reads the clean picture put in front."""
    check_times(times)
    reading = [read_clean(process, prediction, time) for time in times]
    rows = tuple(Row(*one, *other) for one, other in zip(reading, weights, strict=True))
    start = (process.alpha[times[0]], process.sigma[times[0]])
    return StepTable(name, times, start, rows, looks_back, is_random)


def read_clean(process: NoiseProcess, prediction: str, time: int) -> tuple[float, float]:
    """How the clean picture follows from the noisy one and the model's output."""
    alpha, sigma = process.alpha[time], process.sigma[time]
    if prediction == "sample":
        return 0.0, 1.0
    if prediction == "epsilon":
        if alpha <= 0:
            raise ModelError("where there is only noise, a model that predicts noise says nothing about the picture.")
        return 1 / alpha, -sigma / alpha
    if prediction == "v" and not process.is_flow:
        return alpha, -sigma
    if prediction == "velocity" and process.is_flow:
        return 1.0, -sigma
    if prediction in PREDICTIONS:
        raise ModelError(f"a model of the process {process.name} does not predict {prediction}.")
    raise ModelError(f"there is no prediction {prediction!r}: there are {', '.join(PREDICTIONS)}.")

"""The table of a sampler: for each step a time step and a row of weights.

From the noisy image x and the model's output, a step first computes the clean image,

    clean image = from_noisy · x + from_output · output,

then the noisy image of the next step,

    next x = noisy · x + clean · clean image + before · clean image of the previous step + fresh · fresh noise.

The six factors are the fields of `Row`.
"""

from dataclasses import dataclass
from typing import NamedTuple

from redline.errors import ModelError
from redline.models.samplers.noise_process import NoiseProcess
from redline.models.samplers.timesteps import check_times

# What a model can predict: the clean image, the noise, the v of diffusion, or the velocity of a flow.
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
    """`start` holds the weights of image and noise at the start of a frame.

    If `looks_back` is set, a step needs the clean image of the previous step; if `is_random` is set, it needs fresh
    noise. Both depend on the sampler only, not on the strength, so that a captured CUDA graph works for every strength.
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
    check_times(times)
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

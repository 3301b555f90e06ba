"""DDIM (Song, Meng and Ermon, 2021): scales the predicted noise down to the noise level of the next step."""

from redline.models.samplers.noise_process import NoiseProcess
from redline.models.samplers.step_table import StepTable, make_table
from redline.models.samplers.timesteps import intervals


def ddim(process: NoiseProcess, prediction: str, times: tuple[int, ...]) -> StepTable:
    """Returns deterministic DDIM (eta = 0); the last step ends at the clean image."""
    weights = []
    for time, later in intervals(times):
        alpha, sigma = process.alpha[time], process.sigma[time]
        next_alpha, next_sigma = (1.0, 0.0) if later is None else (process.alpha[later], process.sigma[later])
        # The predicted noise is (noisy − alpha · clean) / sigma.
        weights.append((next_sigma / sigma, next_alpha - alpha * next_sigma / sigma))
    return make_table("ddim", process, prediction, times, weights)

"""One to four steps of a distilled model: each takes the model's clean picture and puts fresh noise on it.

That is how consistency models are sampled (Song et al., 2023; Luo et al., 2023): a step repairs what the one before
left, instead of following a path that so few steps could not follow.
"""

from redline.errors import ModelError
from redline.models.samplers.noise_process import NoiseProcess
from redline.models.samplers.step_table import StepTable, make_table

MOST_STEPS = 4


def distilled(process: NoiseProcess, prediction: str, times: tuple[int, ...]) -> StepTable:
    if len(times) > MOST_STEPS:
        raise ModelError(f"the distilled sampler takes 1 to {MOST_STEPS} steps, not {len(times)}.")
    weights: list[tuple[float, ...]] = [(0.0, process.alpha[later], 0.0, process.sigma[later]) for later in times[1:]]
    weights.append((0.0, 1.0, 0.0, 0.0))
    return make_table("distilled", process, prediction, times, weights, is_random=len(times) > 1)

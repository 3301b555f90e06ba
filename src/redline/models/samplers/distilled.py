"""Samples a distilled model in one to four steps: each takes the predicted clean image and adds fresh noise to it.

This is consistency sampling (Song et al., 2023; Luo et al., 2023): each step corrects the prediction of the previous
one, instead of following an ODE trajectory, for which so few steps are too coarse.
"""

from redline.errors import ModelError
from redline.models.samplers.noise_process import NoiseProcess
from redline.models.samplers.step_table import StepTable, make_table

MOST_STEPS = 4


def distilled(process: NoiseProcess, prediction: str, times: tuple[int, ...]) -> StepTable:
    if len(times) > MOST_STEPS:
        raise ModelError(f"the sampler 'distilled' supports 1 to {MOST_STEPS} steps, not {len(times)}.")
    weights: list[tuple[float, ...]] = [(0.0, process.alpha[later], 0.0, process.sigma[later]) for later in times[1:]]
    weights.append((0.0, 1.0, 0.0, 0.0))
    return make_table("distilled", process, prediction, times, weights, is_random=len(times) > 1)

"""DPM-Solver++ 2M (Lu et al., 2022): a second-order step from the clean pictures of this step and the one before.

The first step has nothing before it, and the last goes to no noise at all, where the second-order term has no meaning:
both are of first order, which is DDIM.
"""

import math

from redline.models.samplers.noise_process import NoiseProcess
from redline.models.samplers.step_table import StepTable, make_table
from redline.models.samplers.timesteps import intervals


def dpm_solver(process: NoiseProcess, prediction: str, times: tuple[int, ...]) -> StepTable:
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
            # A step from pure noise is infinitely long, and what came before it no guide.
            back = 0.0 if math.isinf(step_before) else step / step_before / 2
        noisy = process.sigma[later] / process.sigma[time]
        weights.append((noisy, towards_clean * (1 + back), -towards_clean * back))
    return make_table("dpm_solver", process, prediction, times, weights, looks_back=len(times) > 2)

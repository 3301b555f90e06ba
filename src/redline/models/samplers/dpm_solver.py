"""DPM-Solver++ 2M (Lu et al., 2022): second-order steps from the predictions of this step and the previous one.

The first step has no previous prediction, and in the last step, to zero noise, the second-order term is undefined. Both
are first-order, which is DDIM.
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
            # A step from pure noise is infinitely long in log-SNR, so the second-order term vanishes.
            back = 0.0 if math.isinf(step_before) else step / step_before / 2
        noisy = process.sigma[later] / process.sigma[time]
        weights.append((noisy, towards_clean * (1 + back), -towards_clean * back))
    return make_table("dpm_solver", process, prediction, times, weights, looks_back=len(times) > 2)

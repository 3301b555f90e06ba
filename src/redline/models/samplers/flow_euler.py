"""Flow matching (Lipman et al., 2023): integrates the velocity from noise to image with Euler steps."""

from redline.errors import ModelError
from redline.models.samplers.noise_process import NoiseProcess
from redline.models.samplers.step_table import StepTable, make_table
from redline.models.samplers.timesteps import intervals


def flow_euler(process: NoiseProcess, prediction: str, times: tuple[int, ...]) -> StepTable:
    if not process.is_flow:
        raise ModelError(f"the sampler 'flow_euler' needs the noise process 'flow', not {process.name!r}.")
    weights = []
    for time, later in intervals(times):
        sigma = process.sigma[time]
        change = (0.0 if later is None else process.sigma[later]) - sigma
        # The velocity is (noisy − clean) / sigma.
        weights.append((1 + change / sigma, -change / sigma))
    return make_table("flow_euler", process, prediction, times, weights)

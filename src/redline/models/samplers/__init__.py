"""Diffusion samplers: four tables of weights, and one class that runs them.

Each step of a sampler is a weighted sum of up to four images: the noisy image, the model's prediction, the prediction
of the previous step, and fresh noise. A sampler is therefore a table of weights, computed once in double precision and
kept on the device. Running it needs no synchronization, and a change of strength only rewrites the table.
"""

from redline.models.samplers.sampler import Sampler, State
from redline.models.samplers.step_table import (
    MOST_STEPS,
    PREDICTIONS,
    PROCESSES,
    SAMPLERS,
    NoiseProcess,
    StepTable,
    ddim,
    distilled,
    dpm_solver,
    flow_euler,
    noise_process,
    sampler_table,
    spaced_timesteps,
)

__all__ = ["MOST_STEPS", "PREDICTIONS", "PROCESSES", "SAMPLERS", "NoiseProcess", "Sampler", "State", "StepTable"]
__all__ += ["ddim", "distilled", "dpm_solver", "flow_euler", "noise_process", "sampler_table", "spaced_timesteps"]

"""Diffusion samplers: four tables of weights, and one class that runs them.

Each step of a sampler is a weighted sum of up to four images: the noisy image, the model's prediction, the prediction
of the previous step, and fresh noise. A sampler is therefore a table of weights, computed once in double precision and
kept on the device. Running it needs no synchronization, and a change of strength only rewrites the table.
"""

from collections.abc import Callable

from redline.errors import ModelError
from redline.models.samplers.ddim import ddim
from redline.models.samplers.distilled import distilled
from redline.models.samplers.dpm_solver import dpm_solver
from redline.models.samplers.flow_euler import flow_euler
from redline.models.samplers.noise_process import PROCESSES, NoiseProcess, noise_process
from redline.models.samplers.sampler import Sampler, State
from redline.models.samplers.step_table import PREDICTIONS, StepTable
from redline.models.samplers.timesteps import spaced_timesteps

__all__ = [
    "PREDICTIONS",
    "PROCESSES",
    "SAMPLERS",
    "NoiseProcess",
    "Sampler",
    "State",
    "StepTable",
    "ddim",
    "distilled",
    "dpm_solver",
    "flow_euler",
    "noise_process",
    "sampler_table",
    "spaced_timesteps",
]

SAMPLERS: dict[str, Callable[[NoiseProcess, str, tuple[int, ...]], StepTable]] = {
    "ddim": ddim,
    "dpm_solver": dpm_solver,
    "flow_euler": flow_euler,
    "distilled": distilled,
}


def sampler_table(name: str, process: str, prediction: str, steps: int, strength: float = 1.0) -> StepTable:
    """Returns the table of a sampler by name; `strength` is the share of the noise at the start."""
    if name not in SAMPLERS:
        raise ModelError(f"unknown sampler {name!r} (available: {', '.join(SAMPLERS)}).")
    return SAMPLERS[name](noise_process(process), prediction, spaced_timesteps(steps, strength))

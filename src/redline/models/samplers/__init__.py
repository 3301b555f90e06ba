"""How a diffusion model gets from noise to a picture: four samplers, each a table of numbers that one class runs.

Every step of each of them is a weighted sum of at most four pictures (the noisy one, the model's picture, its picture
of the step before, fresh noise). So a sampler is a table of weights, made once in double precision and kept on the
device; running it never asks the device for anything, and another strength is other numbers in the same table.
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
from redline.models.samplers.timesteps import spread

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
    "spread",
]

SAMPLERS: dict[str, Callable[[NoiseProcess, str, tuple[int, ...]], StepTable]] = {
    "ddim": ddim,
    "dpm_solver": dpm_solver,
    "flow_euler": flow_euler,
    "distilled": distilled,
}


def sampler_table(name: str, process: str, prediction: str, steps: int, strength: float = 1.0) -> StepTable:
    """The table of a sampler by its name; `strength` says from how much noise it starts."""
    if name not in SAMPLERS:
        raise ModelError(f"there is no sampler {name!r}: there are {', '.join(SAMPLERS)}.")
    return SAMPLERS[name](noise_process(process), prediction, spread(steps, strength))

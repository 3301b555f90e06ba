"""Noise processes: the share of image and noise at each of 1,000 time steps.

`flow` interpolates linearly from image to noise. The others preserve variance (alpha² + sigma² = 1) and use the beta
schedules of the same names in diffusers.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from redline.errors import ModelError

STEPS = 1000
PROCESSES = ("flow", "scaled_linear", "linear", "cosine")


@dataclass(frozen=True)
class NoiseProcess:
    """The noisy image at step t is alpha[t] · image + sigma[t] · noise; noise increases with t."""

    name: str
    alpha: tuple[float, ...]
    sigma: tuple[float, ...]

    @property
    def is_flow(self) -> bool:
        return self.name == "flow"

    def log_snr(self, step: int) -> float:
        """Returns log(alpha / sigma), as used by solvers; −∞ for pure noise."""
        alpha, sigma = self.alpha[step], self.sigma[step]
        return math.log(alpha / sigma) if alpha > 0 else -math.inf

    def tables(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Returns alpha and sigma as tensors on a device, indexed by time step."""
        return torch.tensor(self.alpha, device=device), torch.tensor(self.sigma, device=device)


def noise_process(name: str, shift: float = 1.0) -> NoiseProcess:
    """Returns a noise process by name; `shift` above 1 gives a flow more noise, which suits large images."""
    if name not in PROCESSES:
        raise ModelError(f"unknown noise process {name!r} (available: {', '.join(PROCESSES)}).")
    if shift != 1.0 and name != "flow":
        raise ModelError(f"shift is only supported by the noise process 'flow', not by {name!r}.")
    if shift <= 0:
        raise ModelError(f"shift must be above zero, not {shift}.")
    if name == "flow":
        straight = torch.arange(1, STEPS + 1, dtype=torch.float64) / STEPS
        sigma = shift * straight / (1 + (shift - 1) * straight)
        alpha = 1 - sigma
    else:
        kept = torch.cumprod(1 - _betas(name), 0)
        alpha, sigma = kept.sqrt(), (1 - kept).sqrt()
    return NoiseProcess(name, tuple(alpha.tolist()), tuple(sigma.tolist()))


def _betas(name: str) -> Tensor:
    first, last = 0.00085, 0.012
    if name == "scaled_linear":
        return torch.linspace(first**0.5, last**0.5, STEPS, dtype=torch.float64) ** 2
    if name == "linear":
        return torch.linspace(0.0001, 0.02, STEPS, dtype=torch.float64)
    time = torch.arange(STEPS + 1, dtype=torch.float64) / STEPS
    kept = torch.cos((time + 0.008) / 1.008 * math.pi / 2) ** 2
    return (1 - kept[1:] / kept[:-1]).clamp(max=0.999)

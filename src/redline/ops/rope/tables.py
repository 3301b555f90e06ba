"""Tables of cosines and sines for every position. Angles are fp64: fp32 is inexact at large positions.

Scaling extends a model to sequences longer than it was trained on. Linear scaling divides all frequencies. Llama 3's
scaling divides only the low frequencies, and keeps those that rotate many times within the original length.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from redline.errors import ModelError


@dataclass(frozen=True)
class LinearScaling:
    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    """The fields of `rope_scaling` in the `config.json` of Llama 3."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


Scaling = LinearScaling | Llama3Scaling


def rope_tables(
    length: int,
    head_dim: int,
    base: float = 10_000.0,
    scaling: Scaling | None = None,
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns fp32 cosines and sines, each (length, head_dim / 2), for the positions 0 to length − 1."""
    if torch.empty(0, device=device).is_meta:
        # Nothing is computed: that would import TorchDynamo.
        _check(head_dim, base, scaling)
        cos, sin = (torch.empty(length, head_dim // 2, dtype=torch.float32, device=device) for _ in range(2))
        return cos, sin
    positions = torch.arange(length, dtype=torch.float64, device=device)
    angles = positions[:, None] * frequencies(head_dim, base, scaling, device)[None, :]
    return angles.cos().float(), angles.sin().float()


def frequencies(
    head_dim: int,
    base: float = 10_000.0,
    scaling: Scaling | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Returns the rotation of each pair of channels in radians per position, fp64, (head_dim / 2,)."""
    _check(head_dim, base, scaling)
    plain = base ** (torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / -head_dim)
    if scaling is None:
        return plain
    slowed = plain / scaling.factor
    if isinstance(scaling, LinearScaling):
        return slowed
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = scaling.original_max_position_embeddings * plain / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return kept * plain + (1 - kept) * slowed


def _check(head_dim: int, base: float, scaling: Scaling | None) -> None:
    if head_dim < 2 or head_dim % 2:
        raise ModelError(f"rope: head_dim must be even and at least 2, not {head_dim}.")
    if base <= 0:
        raise ModelError(f"rope: base must be more than 0, not {base}.")
    if scaling is not None and scaling.factor <= 0:
        raise ModelError(f"rope: the scaling factor must be more than 0, not {scaling.factor}.")
    if isinstance(scaling, Llama3Scaling):
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        if not 0 < low < high:
            raise ModelError(
                f"rope: Llama 3 scaling needs 0 < low_freq_factor < high_freq_factor, not {low} and {high}."
            )

"""Cosines and sines for every position: angles in fp64, since fp32 loses digits of the angle far into a text.

Scaling stretches the angles for texts longer than a model was trained on: `linear` slows all of them, Llama 3's only
the slow ones, and leaves alone those that turn many times within the original length.
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
    """Field by field what a Llama 3 `config.json` has."""

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
    """Cosines and sines in fp32, (length, head_dim / 2), for the positions 0 to length − 1."""
    positions = torch.arange(length, dtype=torch.float64, device=device)
    angles = positions[:, None] * frequencies(head_dim, base, scaling, device)[None, :]
    return angles.cos().float(), angles.sin().float()


def frequencies(
    head_dim: int,
    base: float = 10_000.0,
    scaling: Scaling | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Radians that each pair of channels turns by from one token to the next, in fp64, (head_dim / 2,)."""
    if head_dim < 2 or head_dim % 2:
        raise ModelError(f"rotary embedding needs an even number of channels a head, not {head_dim}.")
    if base <= 0:
        raise ModelError(f"the base of a rotary embedding is more than 0, not {base}.")
    plain = base ** (torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / -head_dim)
    if scaling is None:
        return plain
    if scaling.factor <= 0:
        raise ModelError(f"the factor of a rotary embedding's scaling is more than 0, not {scaling.factor}.")
    slowed = plain / scaling.factor
    if isinstance(scaling, LinearScaling):
        return slowed
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    if not 0 < low < high:
        raise ModelError(f"Llama 3's scaling needs 0 < low_freq_factor < high_freq_factor, not {low} and {high}.")
    turns = scaling.original_max_position_embeddings * plain / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return kept * plain + (1 - kept) * slowed

"""Batches that look like text without being any: for finding a batch size, and for climbing.

Tokens are drawn as words are in real text, a few often and most rarely (Zipf's law), so that there is something to
learn from the first step on. Documents have lengths as different as real ones, and are packed the same way.
"""

import math

import torch
from torch import Tensor

from redline.nn.packing import Packing
from redline.training.text.packing import NO_TARGET, Batch

_MEAN_DOCUMENT = 600


def synthetic_batch(rows: int, length: int, vocabulary: int, seed: int) -> Batch:
    """Always on the host, whatever the default device is."""
    random = torch.Generator("cpu").manual_seed(seed)
    uniform = torch.rand(rows, length + 1, generator=random, device="cpu")
    tokens = uniform.mul(math.log(vocabulary)).exp().long().clamp(1, vocabulary) - 1
    begins = torch.rand(rows, length + 1, generator=random, device="cpu") < 1 / _MEAN_DOCUMENT
    documents: Tensor = begins.cumsum(1)
    targets = torch.where(documents[:, 1:] == documents[:, :-1], tokens[:, 1:], NO_TARGET)
    return Batch(tokens[:, :-1].contiguous(), targets, Packing.of(documents[:, :-1].contiguous()))

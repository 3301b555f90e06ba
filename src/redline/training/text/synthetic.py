"""Synthetic batches for the search of a batch size and for climbs.

Token frequencies follow Zipf's law, so that the loss falls from the first step on. The lengths of documents vary as
much as those of real documents, and rows are packed the same way.
"""

import math

import torch
from torch import Tensor

from redline.nn.packing import Packing
from redline.training.text.packing import NO_TARGET, Batch

_MEAN_DOCUMENT = 600


def synthetic_batch(rows: int, length: int, vocabulary: int, seed: int) -> Batch:
    """Returns a batch in host memory, whatever the default device is."""
    random = torch.Generator("cpu").manual_seed(seed)
    uniform = torch.rand(rows, length + 1, generator=random, device="cpu")
    tokens = uniform.mul(math.log(vocabulary)).exp().long().clamp(1, vocabulary) - 1
    begins = torch.rand(rows, length + 1, generator=random, device="cpu") < 1 / _MEAN_DOCUMENT
    documents: Tensor = begins.cumsum(1)
    targets = torch.where(documents[:, 1:] == documents[:, :-1], tokens[:, 1:], NO_TARGET)
    return Batch(tokens[:, :-1].contiguous(), targets, Packing.of(documents[:, :-1].contiguous()))

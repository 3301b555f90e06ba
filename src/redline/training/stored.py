"""The file names of a training's result, and the rounding of weights to the dtype in which they are stored."""

import copy
from typing import TypeVar

import torch
from torch import nn

from redline.errors import RedlineError

WEIGHTS, CARD = "model.safetensors", "model-card.md"
DTYPES = {"fp16": torch.float16, "fp32": torch.float32}
M = TypeVar("M", bound=nn.Module)


@torch.no_grad()
def as_stored(model: M, dtype: torch.dtype) -> M:
    """Returns a copy whose weights are rounded to `dtype`, as if stored and read back."""
    result = copy.deepcopy(model)
    for weight in result.parameters():
        weight.copy_(weight.to(dtype).float())
        if not torch.isfinite(weight).all():
            raise RedlineError('a weight is too large for fp16: set weights = "fp32" under [model].')
    return result

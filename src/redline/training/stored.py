"""What the results of all kinds of training share: file names, rounded weights, the name of the device."""

import copy
import platform
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


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"a CPU ({platform.machine()})"

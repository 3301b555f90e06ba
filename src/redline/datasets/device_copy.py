"""Copies small tensors to a device asynchronously."""

from dataclasses import dataclass, fields
from typing import Self

import torch
from torch import Tensor


def copy_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies through pinned memory, because a copy from pageable memory may block the host until the device is idle."""
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


@dataclass(frozen=True)
class SampledTensors:
    """The base class of dataclasses of tensors that are sampled on the host and used on a device."""

    def to(self, device: torch.device) -> Self:
        return type(self)(*(copy_to_device(getattr(self, field.name), device) for field in fields(self)))

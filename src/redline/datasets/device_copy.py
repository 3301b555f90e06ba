"""Copies small tensors to a device asynchronously."""

import torch
from torch import Tensor


def copy_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies from pinned memory, because a copy from pageable memory may block the host until the device is idle."""
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)

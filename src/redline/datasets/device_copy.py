"""Small tables on their way to the device, without the host waiting for it."""

import torch
from torch import Tensor


def send(tables: list[Tensor], device: torch.device) -> list[Tensor]:
    """From pinned memory, because a copy from other memory may wait until the device has nothing else to do."""
    if device.type != "cuda":
        return [table.to(device) for table in tables]
    return [table.pin_memory().to(device, non_blocking=True) for table in tables]

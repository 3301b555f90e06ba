"""How much of a device's memory each run of a process takes, and whether the device still answers."""

import torch

from redline.machine.memory import free_cuda_caches


class DevicePeaks:
    """Peaks beyond what others hold, once what was left behind is let go of. On a CPU, which keeps none, they are 0."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._is_cuda, self._held_bytes = device, device.type == "cuda", 0
        if self._is_cuda:
            # Compiled code holds on to its weights, and a recorded engine to itself.
            torch.compiler.reset()
            free_cuda_caches()
            self._held_bytes = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)

    def take(self) -> int:
        """The peak since the last time, or since it was made."""
        if not self._is_cuda:
            return 0
        peak = torch.cuda.max_memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return peak - self._held_bytes


def is_lost(device: torch.device) -> bool:
    """Some errors stay with a process for good: whatever it asks of the device after them fails."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False

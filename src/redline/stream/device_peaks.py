"""Measures the peak device memory of successive runs in one process, and detects a lost device."""

import torch

from redline.machine.memory import free_cuda_caches


class DevicePeaks:
    """Measures peaks above the memory that was allocated at construction. Always 0 on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._is_cuda, self._held_bytes = device, device.type == "cuda", 0
        if self._is_cuda:
            # Compiled code and captured graphs keep references to weights until the compiler is reset.
            torch.compiler.reset()
            free_cuda_caches()
            self._held_bytes = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)

    def take(self) -> int:
        """Returns the peak since the previous call or the construction."""
        if not self._is_cuda:
            return 0
        peak = torch.cuda.max_memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return peak - self._held_bytes


def is_lost(device: torch.device) -> bool:
    """Returns whether a CUDA error has made the device unusable for the rest of the process."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False

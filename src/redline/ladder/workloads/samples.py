"""Makes the batches of a workload from the user's samples: the samples themselves, and random variations of them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from redline.errors import WorkloadError
from redline.ladder.gate import tensors_of
from redline.ladder.workload import Inputs
from redline.machine.trees import tree_map_only

# The standard deviations of the random shift and the random factor of each example, and of the noise. Shift and noise
# are in units of the tensor's standard deviation.
_SHIFT, _SCALE, _NOISE = 0.3, 0.3, 0.3


class SampleInputs:
    """Returns the batch of a seed: the samples themselves for the first seeds of calibration, judging and timing.

    All other batches are random variations of them. The final race uses only variations, which no trial has seen.
    """

    def __init__(self, samples: Sequence[Inputs]) -> None:
        self.samples = tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), list(samples))
        tensors = tensors_of(self.samples)
        if not tensors:
            raise WorkloadError("samples= holds no tensor: give a batch as you would pass it to the model.")
        if len(self.samples) < 2 and not any(map(_varies, tensors)):
            raise WorkloadError(
                "every tensor in samples= is constant, a mask or empty, so no second batch can be derived from it: "
                "give random values, or a list of several batches."
            )

    def __call__(self, seed: int) -> Inputs:
        # Seeds start at 0 (timing), 10 (judging), 20 (final race) and 100 (calibration).
        index = seed % 10
        sample = self.samples[index % len(self.samples)]
        if seed // 10 == 2 or index >= len(self.samples):
            sample = tree_map_only(Tensor, _vary, sample)
        device = torch.get_default_device()
        return tree_map_only(Tensor, lambda tensor: tensor.to(device), sample)


def random_like(tensor: Tensor) -> Tensor:
    """Returns a variation of an example on the default device; a constant example becomes random values."""
    device = torch.get_default_device()
    if _varies(tensor):
        return _vary(tensor.cpu()).to(device)
    if tensor.is_floating_point() and not bool((tensor == 1).all()):
        return torch.randn(tensor.shape, dtype=tensor.dtype)
    if tensor.dtype in (torch.int32, torch.int64) and not tensor.any():
        return torch.randint(2, tensor.shape, dtype=tensor.dtype)
    return tensor.to(device)  # for example a mask or positions, which must not be varied


def _varies(tensor: Tensor) -> bool:
    """Returns whether `_vary` changes a tensor; it does not change masks, constants and sorted integers (positions)."""
    if tensor.numel() < 2 or tensor.is_complex() or len(torch.unique(tensor.flatten()[:4096])) <= 2:
        return False
    if tensor.is_floating_point():
        return bool(torch.isfinite(tensor).all())
    return bool((tensor.diff(dim=-1) < 0).any())


@torch.no_grad()
def _vary(tensor: Tensor) -> Tensor:
    """Returns a tensor of the same shape and range: permutes integers; shifts, scales and adds noise to floats."""
    if not _varies(tensor):
        return tensor
    if not tensor.is_floating_point():
        return tensor.flatten()[torch.randperm(tensor.numel(), device="cpu")].view_as(tensor)
    values = tensor.float()
    mean, deviation = values.mean(), values.std()
    each = (len(tensor), *(1 for _ in tensor.shape[1:]))
    shift, scale = torch.randn(2, *each, device="cpu")
    varied = mean + (values - mean) * (1 + _SCALE * scale)
    varied = varied + deviation * (_SHIFT * shift + _NOISE * torch.randn(values.shape, device="cpu"))
    return varied.clamp(values.min(), values.max()).to(tensor.dtype)

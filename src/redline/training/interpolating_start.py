"""Initializes a DRCT so that it starts as an interpolation.

From random weights, the first steps only learn that the output resembles the input. To save these steps, a few channels
carry the colours through the first convolution, around the body, and through the tail. Its upsampling starts as linear
interpolation. The tail's LeakyReLU changes negative values, so each colour takes two channels, one of them negated:
LeakyReLU(x) − LeakyReLU(−x) = 1.01·x. All other weights stay random, and all weights are trained.
"""

import torch
from torch import Tensor, nn

from redline.errors import RedlineError
from redline.models.drct import Drct

_COLOURS = 3


@torch.no_grad()
def start_as_interpolation(model: Drct) -> None:
    """Sets the weights so that the untrained network interpolates its input."""
    if model.config.features < 2 * _COLOURS:
        raise RedlineError(f"features = {model.config.features} under [model] must be at least {2 * _COLOURS}.")
    bend = model.conv_before_upsample[1]
    assert isinstance(bend, nn.LeakyReLU)
    _pass(model.conv_first, torch.eye(_COLOURS))
    _pass(model.conv_after_body, torch.zeros(_COLOURS, 0))
    _pass(model.conv_before_upsample[0], torch.cat((torch.eye(_COLOURS), -torch.eye(_COLOURS))))
    joined = torch.cat((torch.eye(_COLOURS), -torch.eye(_COLOURS)), 1) / (1 + bend.negative_slope)
    steps = [step for step in model.upsample if isinstance(step, nn.Conv2d)]
    for factor, convolution in zip(model.config.upsampling, steps, strict=True):
        _pass(convolution, joined, linear_kernels(factor))
        joined = torch.eye(_COLOURS)
    _pass(model.conv_last, torch.eye(_COLOURS))


def _pass(convolution: nn.Module, mixing: Tensor, kernels: Tensor | None = None) -> None:
    """Makes the first output channels `mixing` times the first input channels, convolved with each kernel."""
    assert isinstance(convolution, nn.Conv2d) and convolution.bias is not None
    if kernels is None:
        kernels = torch.zeros(1, 3, 3)
        kernels[0, 1, 1] = 1
    outputs = len(mixing) * len(kernels)
    convolution.weight[:outputs] = 0
    convolution.bias[:outputs] = 0
    spread = torch.einsum("oi,kab->okiab", mixing, kernels.to(mixing)).flatten(0, 1)
    convolution.weight[:outputs, : mixing.shape[1]] = spread.to(convolution.weight)


def linear_kernels(factor: int) -> Tensor:
    """Returns 3 × 3 kernels of linear interpolation for each of the factor² new pixels in an old one, row by row."""
    offset = (torch.arange(factor) + 0.5) / factor - 0.5
    taps = (1 - (offset[:, None] - torch.tensor([-1.0, 0.0, 1.0])).abs()).clamp_min(0)
    return torch.einsum("ia,jb->ijab", taps, taps).flatten(0, 1)

"""Initializes a DRCT as an interpolation, or with the weights of another DRCT, whose scale may differ.

If all weights are random, the first steps only learn that the output resembles the input. To save these steps, a few
channels pass the colours unchanged through the first convolution, past the body, and through the tail. The tail's
upsampling starts as linear interpolation. The tail's LeakyReLU changes negative values, so each colour uses two
channels, one of them negated: LeakyReLU(x) − LeakyReLU(−x) = 1.01·x. All other weights stay random, and all weights are
trained.

All layers but the upsampling have the same shapes at any scale, so a ×2 model can start from the weights of a ×4 model.
The upsampling weights are copied only if the scales are equal.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from redline.datasets.photo_pairs import hash_of
from redline.errors import RedlineError
from redline.models.drct import Drct, DrctConfig, load_drct

_COLOURS = 3
_UPSAMPLING = "upsample."


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
    """Sets the first output channels to `mixing` @ (first input channels), convolved with each of the kernels."""
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
    """Returns a 3 × 3 kernel of linear interpolation for each of the factor² output pixels per input pixel."""
    offset = (torch.arange(factor) + 0.5) / factor - 0.5
    taps = (1 - (offset[:, None] - torch.tensor([-1.0, 0.0, 1.0])).abs()).clamp_min(0)
    return torch.einsum("ia,jb->ijab", taps, taps).flatten(0, 1)


@dataclass(frozen=True)
class StartingWeights:
    """The name and the checksum of a file with initial weights, and the name of the model in it."""

    name: str
    sha256: str
    model: str
    has_upsampling: bool

    def __str__(self) -> str:
        what = "all weights" if self.has_upsampling else "all weights but those of the upsampling"
        return f"{what} of `{self.name}`, a {self.model} (sha256 {self.sha256[:16]})"


@torch.no_grad()
def start_from(model: Drct, path: str | Path) -> StartingWeights:
    """Loads the weights of a file into the model. Raises if their dimensions differ."""
    found = load_drct(path)
    _check(found.config, model.config, path)
    same_scale = found.config.scale == model.config.scale
    weights = {name: weight for name, weight in found.state_dict().items() if same_scale or not _is_upsampling(name)}
    missing = model.load_state_dict(weights, strict=False).missing_keys
    assert all(_is_upsampling(name) for name in missing) and bool(missing) != same_scale
    return StartingWeights(Path(path).name, hash_of(Path(path)), str(found.config), same_scale)


def _is_upsampling(name: str) -> bool:
    return name.startswith(_UPSAMPLING)


def _check(found: DrctConfig, wanted: DrctConfig, path: str | Path) -> None:
    if replace(found, scale=wanted.scale) == wanted:
        return
    names = ("groups", "width", "growth", "features", "window", "heads", "mlp_widths")
    other = next(name for name in names if getattr(found, name) != getattr(wanted, name))
    has, takes = (_listed(getattr(config, other)) for config in (found, wanted))
    raise RedlineError(
        f"training cannot start from {str(path)!r}: its {other.replace('_', ' ')} "
        f"{'are' if other.endswith('s') else 'is'} {has}, and the config says {takes}."
    )


def _listed(value: int | tuple[int, ...]) -> str:
    return "/".join(map(str, value)) if isinstance(value, tuple) else str(value)

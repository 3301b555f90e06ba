"""Initializes a DRCT with the weights of another one, whose scale may differ.

All layers but the upsampling have the same shapes at any scale, so a ×2 model can start from the weights of a ×4 model.
The upsampling weights are copied only if the scales are equal.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from redline.datasets.photo_pairs import hash_of
from redline.errors import RedlineError
from redline.models.drct import Drct, DrctConfig, load_drct

_UPSAMPLING = "upsample."


@dataclass(frozen=True)
class StartingWeights:
    """The name and the checksum of a file of initial weights, and the name of the model in it."""

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

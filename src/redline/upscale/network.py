"""Loads the network from its weights: DRCT, or any model that spandrel knows if spandrel is installed."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module, resources
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn

from redline.errors import ModelError
from redline.files.weights import read_weights
from redline.models.drct import Drct, read_drct


@dataclass(frozen=True)
class Network:
    """A network that upscales by `scale`, for sizes that are multiples of `window`; `digest` identifies its weights.

    An exported network takes only tiles of the size `tile`.
    """

    module: nn.Module
    scale: int
    window: int
    name: str
    digest: str
    tile: int | None = None


def load_network(weights: str | Path | None = None, scale: int | None = None) -> Network:
    """Loads a weight file, or the bundled weights for the scale (4 by default)."""
    path = shipped_weights(4 if scale is None else scale) if weights is None else Path(weights)
    network = _read_network(path)
    check_scale(network, scale, path)
    return network


def check_scale(network: Network, scale: int | None, path: Path) -> None:
    """Raises `ModelError` if the weights are for another scale."""
    if scale not in (None, network.scale):
        raise ModelError(f"{str(path)!r} is for ×{network.scale}, not ×{scale}: leave out --scale.")


def _read_network(path: Path) -> Network:
    found = read_weights(path)
    digest = digest_of(found)
    try:
        model: nn.Module = read_drct(found, str(path))
    except ModelError as refused:
        if "layers.0.swin5.attn.qkv.weight" in found:
            raise  # it is a DRCT with wrong shapes, which spandrel cannot read either
        return _load_with_spandrel(found, path, digest, refused)
    assert isinstance(model, Drct)
    return Network(model, model.config.scale, model.config.window, str(model.config), digest)


def bundled_weights() -> dict[str, Path]:
    """Returns the weight files that come with Redline, by the names of the networks."""
    folder = Path(str(resources.files("redline.models.drct"))) / "weights"
    return {path.stem: path for path in sorted(folder.glob("drct-small-x*.safetensors"))}


def find_weights(model: str | Path) -> Path:
    """Returns the weight file of the bundled network with this name, or the given path."""
    bundled, path = bundled_weights(), Path(model)
    if not path.exists() and str(model) in bundled:
        return bundled[str(model)]
    if not path.exists() and not path.suffix and len(path.parts) == 1:
        names = ", ".join(bundled)
        raise ModelError(f"unknown model {str(model)!r}: choose {names}, or give the path of a weight file.")
    return path


def shipped_weights(scale: int) -> Path:
    """Returns the bundled weights for this scale; raises `ModelError` if there are none."""
    bundled = bundled_weights()
    path = bundled.get(f"drct-small-x{scale}")
    if path is None:
        names = f"the bundled models are {', '.join(bundled)}" if bundled else "no models are bundled"
        raise ModelError(f"no bundled model for ×{scale}: {names}; give a weight file with --weights.")
    return path


def digest_of(weights: dict[str, Tensor]) -> str:
    """Returns a digest of the weights that does not depend on the file format."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def _load_with_spandrel(weights: dict[str, Tensor], path: Path, digest: str, refused: ModelError) -> Network:
    if find_spec("spandrel") is None:
        other = "other super-resolution models run with spandrel: pip install 'redline[spandrel]'"
        raise ModelError(f"{str(refused).rstrip('.')}; {other}.") from refused
    spandrel = import_module("spandrel")
    try:
        found = spandrel.ModelLoader().load_from_state_dict(weights)
    except Exception as error:  # spandrel raises many types, some without a message
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(f"{str(refused).rstrip('.')}, and spandrel does not know it either ({reason}).") from error
    if not isinstance(found, spandrel.ImageModelDescriptor):
        raise ModelError(f"{str(path)!r} is a {found.architecture.name}, which needs more than one input image.")
    if found.purpose == "FaceSR":
        raise ModelError(f"{str(path)!r} is a {found.architecture.name}, which is for faces only.")
    if found.input_channels != 3 or found.output_channels != 3 or found.scale < 2:
        raise ModelError(
            f"{str(path)!r} is a {found.architecture.name} of {found.input_channels} channels to "
            f"{found.output_channels} at ×{found.scale}; a model of 3 to 3 channels at ×2 or more is needed."
        )
    needs = found.size_requirements
    window = max(needs.multiple_of, 1)
    # Some models return or need more than the image. Only this private attribute of spandrel handles them.
    module = _Called(found.model.eval(), getattr(found, "_call_fn", _plainly))
    return Network(module, found.scale, window, f"{found.architecture.name} ×{found.scale}", digest)


class _Called(nn.Module):
    def __init__(self, model: nn.Module, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.model, self._call = model, call

    def forward(self, tiles: Tensor) -> Tensor:
        return self._call(self.model, tiles)


def _plainly(model: nn.Module, tiles: Tensor) -> Tensor:
    return model(tiles)

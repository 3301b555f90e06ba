"""Loads the network from its weights: a DRCT, any model that spandrel supports, or an ONNX file.

spandrel is optional. ONNX Runtime runs the ONNX files, which `redline export` writes.
"""

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module, resources
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn

from redline.errors import MachineError, ModelError, first_line
from redline.files.weights import read_weights
from redline.ladder.rungs.onnxruntime import PROVIDERS, provider_list
from redline.models.drct import Drct, read_drct

PREFIX = "redline."
_SIZES, _TEXTS = ("scale", "window", "tile"), ("name", "digest", "precision")
_WHOLE_NUMBER = "-?[0-9]{1,9}"


@dataclass(frozen=True)
class Network:
    """A network that upscales by `scale`; the sides of its input must be multiples of `window`.

    `digest` identifies its weights. An exported network accepts only square tiles with sides of `tile`.
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
    return check_scale(_read_network(path), scale, path)


def check_scale(network: Network, scale: int | None, path: Path) -> Network:
    """Returns the network; raises `ModelError` if its weights are for another scale."""
    if scale not in (None, network.scale):
        raise ModelError(f"{str(path)!r} is for ×{network.scale}, not ×{scale}: leave out --scale.")
    return network


def _read_network(path: Path) -> Network:
    found = read_weights(path)
    digest = _digest_of(found)
    try:
        model: nn.Module = read_drct(found, str(path))
    except ModelError as refused:
        if "layers.0.swin5.attn.qkv.weight" in found:
            raise  # the file is a DRCT with wrong shapes, which spandrel cannot read either
        return _load_with_spandrel(found, path, digest, refused)
    assert isinstance(model, Drct)
    return Network(model, model.config.scale, model.config.window, str(model.config), digest)


def bundled_weights() -> dict[str, Path]:
    """Returns the weight files that come with Redline; the keys are the names of the networks."""
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
    bundled, name = bundled_weights(), f"drct-small-x{scale}"
    if name not in bundled:
        names = f"the bundled models are {', '.join(bundled)}" if bundled else "no models are bundled"
        raise ModelError(f"no bundled model for ×{scale}: {names}; give a weight file with --weights.")
    return bundled[name]


def _digest_of(weights: dict[str, Tensor]) -> str:
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
        raise ModelError(
            f"{str(refused).rstrip('.')}, and spandrel does not support it either ({first_line(error)})."
        ) from error
    name = found.architecture.name
    if not isinstance(found, spandrel.ImageModelDescriptor):
        raise ModelError(f"{str(path)!r} is a {name}, which needs more than one input image.")
    if found.purpose == "FaceSR":
        raise ModelError(f"{str(path)!r} is a {name}, which is for faces only.")
    if found.input_channels != 3 or found.output_channels != 3 or found.scale < 2:
        raise ModelError(
            f"{str(path)!r} is a {name} with {found.input_channels} input and {found.output_channels} output "
            f"channels at ×{found.scale}; 3 input and 3 output channels at ×2 or more are needed."
        )
    window = max(found.size_requirements.multiple_of, 1)
    # Some models return or need more than the image; only this private attribute of spandrel handles them.
    call = getattr(found, "_call_fn", lambda model, tiles: model(tiles))
    return Network(_Called(found.model.eval(), call), found.scale, window, f"{name} ×{found.scale}", digest)


class _Called(nn.Module):
    def __init__(self, model: nn.Module, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.model, self._call = model, call

    def forward(self, tiles: Tensor) -> Tensor:
        return self._call(self.model, tiles)


class Onnx(nn.Module):
    """Runs the exported network. Tiles may be on any device; the result is on the same device."""

    def __init__(self, path: Path, providers: list[tuple[str, dict[str, str]]]) -> None:
        super().__init__()
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 3
        try:
            self.session = onnxruntime.InferenceSession(str(path), options, providers=providers)
        except Exception as error:  # ONNX Runtime raises many types
            raise ModelError(f"cannot load {str(path)!r}: it is not an ONNX model, or damaged.") from error

    @property
    def facts(self) -> dict[str, str]:
        found = self.session.get_modelmeta().custom_metadata_map
        return {key.removeprefix(PREFIX): value for key, value in found.items() if key.startswith(PREFIX)}

    def check(self, origin: str, scale: int, window: int, tile: int) -> None:
        """Raises unless the network has one input and one output of the sizes that its metadata claims."""
        if min(scale, window, tile) < 1 or tile % window:
            sizes = f"scale {scale}, window {window}, tile {tile}"
            raise ModelError(f"{origin!r} is damaged: its metadata says {sizes}; export it again.")
        ends = {"input": (self.session.get_inputs(), tile), "output": (self.session.get_outputs(), scale * tile)}
        for name, (found, side) in ends.items():
            shapes = [(item.type, *item.shape[1:]) for item in found]
            if shapes != [("tensor(float)", 3, side, side)]:
                said = f"where its metadata says 3 × {side} × {side}"
                raise ModelError(f"{origin!r} is damaged: its {name} is {shapes}, {said}; export it again.")

    def forward(self, tiles: Tensor) -> Tensor:
        (name,) = (item.name for item in self.session.get_inputs())
        try:
            (result,) = self.session.run(None, {name: tiles.detach().float().cpu().contiguous().numpy()})
        except Exception as error:  # ONNX Runtime raises many types
            raise ModelError(f"ONNX Runtime cannot run the exported network: {first_line(error)}.") from error
        return torch.from_numpy(result).to(tiles.device)


def load_onnx_network(
    path: Path, scale: int | None = None, provider: str = "cpu", device: torch.device | str = "cpu"
) -> Network:
    if find_spec("onnxruntime") is None:
        raise MachineError("ONNX files need ONNX Runtime, which is not installed: pip install onnxruntime.")
    if not path.is_file():
        raise ModelError(f"cannot read the weights {str(path)!r}: there is no such file.")
    module = Onnx(path, providers_for(provider, torch.device(device)))
    facts = _checked_facts(module.facts, str(path))
    own_scale, window, tile = (int(facts[key]) for key in _SIZES)
    name, digest = f"{facts['name']} (ONNX, {facts['precision']})", f"{facts['digest']}-{facts['precision']}"
    module.check(str(path), own_scale, window, tile)
    return check_scale(Network(module, own_scale, window, name, digest, tile), scale, path)


def _checked_facts(facts: dict[str, str], origin: str) -> dict[str, str]:
    """Returns the metadata; raises `ModelError` for the first key that is missing or not valid."""
    if not facts:
        raise ModelError(f"{origin!r} was not written by `redline export`: it lacks its metadata.")
    for key in (*_SIZES, *_TEXTS):
        if key not in facts:
            raise ModelError(f"{origin!r} is damaged: its metadata lacks '{PREFIX}{key}'; export it again.")
        value = facts[key]
        if key in _SIZES and not re.fullmatch(_WHOLE_NUMBER, value):
            shown = repr(value if len(value) <= 20 else value[:20] + "…")
            raise ModelError(
                f"{origin!r} is damaged: '{PREFIX}{key}' of its metadata is {shown}, not a whole number of at most 9 "
                "digits; export it again."
            )
    return facts


def providers_for(provider: str, device: torch.device) -> list[tuple[str, dict[str, str]]]:
    """Returns the provider, followed by the providers that run the nodes that it does not support."""
    import onnxruntime

    if provider not in PROVIDERS:
        raise MachineError(f"unknown provider {provider!r}: choose {', '.join(PROVIDERS)}.")
    if PROVIDERS[provider] not in onnxruntime.get_available_providers():
        raise MachineError(f"the installed ONNX Runtime has no provider {provider}: pip install onnxruntime-gpu.")
    return provider_list(provider, device)

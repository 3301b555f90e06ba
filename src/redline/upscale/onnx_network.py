"""Runs a network from an ONNX file written by `redline export` with ONNX Runtime."""

import re
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn

from redline.errors import MachineError, ModelError
from redline.upscale.network import Network, check_scale

PREFIX = "redline."
_SIZES, _TEXTS = ("scale", "window", "tile"), ("name", "digest", "precision")
_WHOLE_NUMBER = "-?[0-9]{1,9}"
_PROVIDERS = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
}
# The providers in order: a later one runs the nodes that an earlier one does not support.
_PROVIDER_ORDER = {"cpu": ("cpu",), "cuda": ("cuda", "cpu"), "tensorrt": ("tensorrt", "cuda", "cpu")}


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
                raise ModelError(
                    f"{origin!r} is damaged: its {name} is {shapes}, where its metadata says 3 × {side} × {side}; "
                    "export it again."
                )

    def forward(self, tiles: Tensor) -> Tensor:
        (name,) = (item.name for item in self.session.get_inputs())
        try:
            (result,) = self.session.run(None, {name: tiles.detach().float().cpu().contiguous().numpy()})
        except Exception as error:  # ONNX Runtime raises many types
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ModelError(f"ONNX Runtime cannot run the exported network: {reason}.") from error
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
    network = Network(module, own_scale, window, name, digest, tile)
    check_scale(network, scale, path)
    return network


def _checked_facts(facts: dict[str, str], origin: str) -> dict[str, str]:
    """Returns the metadata; raises `ModelError` for the first key that is missing or not valid."""
    if not facts:
        raise ModelError(f"{origin!r} was not written by `redline export`: it has no metadata of it.")
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
    """Returns the provider and the providers for the nodes that it does not support."""
    import onnxruntime

    if provider not in _PROVIDERS:
        raise MachineError(f"unknown provider {provider!r}: choose {', '.join(_PROVIDERS)}.")
    if _PROVIDERS[provider] not in onnxruntime.get_available_providers():
        raise MachineError(f"the installed ONNX Runtime has no provider {provider}: pip install onnxruntime-gpu.")
    on_gpu = {"device_id": str(device.index or 0)}
    return [(_PROVIDERS[kind], {} if kind == "cpu" else on_gpu) for kind in _PROVIDER_ORDER[provider]]

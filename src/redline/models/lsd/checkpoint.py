"""Saves and loads LSD weights: safetensors with the config in the header. Any mismatch of names or shapes raises."""

import json
from pathlib import Path

import torch
from safetensors.torch import save as to_safetensors

from redline.errors import ModelError
from redline.files.atomic import write_bytes
from redline.files.untrusted import parse_json
from redline.files.weights import check_all_finite, check_tensors, mismatches, open_safetensors
from redline.machine.meta import allocate, meta_device
from redline.models.lsd.config import LsdConfig
from redline.models.lsd.model import Lsd

ARCHITECTURE = "lsd"


def save_lsd(
    model: Lsd, path: str | Path, dtype: torch.dtype = torch.float32, about: dict[str, str] | None = None
) -> None:
    """Writes weights and config atomically; `about` adds entries to the header."""
    tensors = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in model.state_dict().items()}
    broken = next((name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()), None)
    if broken:
        raise ModelError(f"{broken!r} has values that are not finite in {str(dtype).removeprefix('torch.')}.")
    header = {**(about or {}), "architecture": ARCHITECTURE, "config": json.dumps(model.config.to_dict())}
    write_bytes(Path(path), to_safetensors(tensors, metadata=header))


def load_lsd(path: str | Path) -> Lsd:
    """Loads a model in fp32 on the CPU, in evaluation mode."""
    path = Path(path)
    with open_safetensors(path) as file:
        header = dict(file.metadata() or {})
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    check_tensors(tensors, str(path), path.stat().st_size)
    config = _config(header, str(path))
    # Checked first, because a damaged header may name so many blocks that building them would take very long.
    if config.blocks * len(config.multipliers) > len(tensors):
        raise ModelError(f"{str(path)!r} has the header of an {config}, but only {len(tensors)} weights.")
    try:
        with meta_device():
            model = Lsd(config)
    except (RuntimeError, TypeError) as error:  # tensor sizes overflow
        raise ModelError(f"{str(path)!r} is damaged: the sizes of its {config} are too large.") from error
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if problem := mismatches(expected, {name: tuple(tensor.shape) for name, tensor in tensors.items()}):
        raise ModelError(f"{str(path)!r} has the header of an {config}, but {problem}.")
    check_all_finite(tensors, str(path))
    model = allocate(model, "cpu")
    model.reset_sinusoids()
    model.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    return model.eval()


def read_about(path: str | Path) -> dict[str, str]:
    """Returns the header of an LSD file without reading the weights."""
    with open_safetensors(Path(path)) as file:
        return dict(file.metadata() or {})


def _config(header: dict[str, str], origin: str) -> LsdConfig:
    if header.get("architecture") != ARCHITECTURE or "config" not in header:
        raise ModelError(f"{origin!r} is not an LSD model: its header has no architecture {ARCHITECTURE!r}.")
    values = parse_json(header["config"], f"the config in the header of {origin!r}", ModelError)
    if not isinstance(values, dict):
        raise ModelError(f"the config in the header of {origin!r} is not a JSON object.")
    return LsdConfig.from_dict(values, origin)

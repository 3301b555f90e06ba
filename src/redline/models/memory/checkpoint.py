"""Saves and loads a Titans model: `config.json` and `model.safetensors` in a folder, with names and shapes checked."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as to_safetensors

from redline.errors import ModelError
from redline.files.untrusted import reading
from redline.machine.meta import allocate, meta_device
from redline.models import MEMORY_MODEL
from redline.models.decoder.checkpoint import SINGLE, Weights, read_json, write_model
from redline.models.memory.config import TitanConfig
from redline.models.memory.model import TitanModel


def save_memory_model(model: TitanModel, folder: str | Path, about: dict[str, Any] | None = None) -> None:
    """Writes the model; `about` adds entries to config.json, for example the end-of-text token."""
    # Tied weights are one parameter with two names, which is saved once.
    tensors = {name: weight.detach().contiguous() for name, weight in model.named_parameters()}
    config = {"model_type": MEMORY_MODEL, **(about or {}), "memory": asdict(model.config)}
    write_model(Path(folder), [(SINGLE, to_safetensors(tensors))], config)


def load_memory_model(
    folder: str | Path, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> TitanModel:
    """Loads a model for inference, in the dtype of its file unless `dtype` is given."""
    folder = Path(folder)
    path = folder / "config.json"
    found = read_json(path)
    if found.get("model_type") != MEMORY_MODEL or not isinstance(found.get("memory"), dict):
        raise ModelError(f"{str(path)!r} is not the config of a Titans model.")
    with reading(path, "config of a Titans model", ModelError):
        config = TitanConfig.from_dict(found["memory"])
    weights = Weights.of(folder)
    weights.check_layers(config.layers)
    try:
        with meta_device():
            model = TitanModel(config)
    except (RuntimeError, TypeError, OverflowError) as error:
        # Sizes from a damaged config.json can exceed 64 bits.
        raise ModelError(f"{str(path)!r} has sizes that are too large for any model.") from error
    weights.check({name: tuple(weight.shape) for name, weight in model.named_parameters()})
    allocate(model, device, dtype or weights.dtype)
    model.tie()
    weights.fill(dict(model.named_parameters()))
    return model.eval().requires_grad_(False)

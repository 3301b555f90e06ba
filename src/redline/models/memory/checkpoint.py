"""A memory model on disk: `config.json` and `model.safetensors` in one folder, every name and shape checked."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as to_safetensors

from redline.errors import ModelError
from redline.files.untrusted import reading
from redline.models import MEMORY_MODEL
from redline.models.decoder.checkpoint import SINGLE, Weights, read_json, write_model
from redline.models.memory.config import TitanConfig
from redline.models.memory.model import TitanModel


def save_memory_model(model: TitanModel, folder: str | Path, about: dict[str, Any] | None = None) -> None:
    """`about` goes into config.json beside the model's own settings: the token that ends a text, for one."""
    # Tied weights are one parameter under two names: kept once.
    tensors = {name: weight.detach().contiguous() for name, weight in model.named_parameters()}
    config = {"model_type": MEMORY_MODEL, **(about or {}), "memory": model.config.to_dict()}
    write_model(Path(folder), [(SINGLE, to_safetensors(tensors))], config)


def load_memory_model(
    folder: str | Path, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> TitanModel:
    """The model of a folder, ready for inference; in the dtype of its file unless another is asked for."""
    folder = Path(folder)
    config = read_memory_config(folder)
    weights = Weights.of(folder)
    weights.check_layers(config.layers)
    try:
        with torch.device("meta"):
            model = TitanModel(config)
    except (RuntimeError, TypeError, OverflowError) as error:
        # A config.json may say any size: beyond 64 bits not even a shape can be made of it.
        raise ModelError(f"{str(folder / 'config.json')!r} has sizes that no model can have.") from error
    weights.check({name: tuple(weight.shape) for name, weight in model.named_parameters()})
    model.to(dtype or weights.dtype).to_empty(device=device)
    model.tie()
    weights.fill(dict(model.named_parameters()))
    return model.eval().requires_grad_(False)


def read_memory_config(folder: Path) -> TitanConfig:
    path = folder / "config.json"
    found = read_json(path)
    if found.get("model_type") != MEMORY_MODEL or not isinstance(found.get("memory"), dict):
        raise ModelError(f"{str(path)!r} is not the config of a memory model.")
    with reading(path, "config of a memory model", ModelError):
        return TitanConfig.from_dict(found["memory"])

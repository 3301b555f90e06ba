"""A memory model on disk: `config.json` and `model.safetensors` in one folder, every name and shape checked."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_safetensors

from redline.errors import ModelError
from redline.files import write_bytes, write_text
from redline.models.memory.config import TitanConfig
from redline.models.memory.model import TitanModel

MODEL_TYPE = "redline_memory"
WEIGHTS = "model.safetensors"


def save_memory_model(model: TitanModel, folder: str | Path, about: dict[str, Any] | None = None) -> None:
    """`about` goes into config.json beside the model's own settings: the token that ends a text, for one."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # Tied weights are one tensor under two names: kept once.
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if not _is_tied(name, model)}
    write_bytes(folder / WEIGHTS, to_safetensors(tensors))
    config = {"model_type": MODEL_TYPE, **(about or {}), "memory": model.config.to_dict()}
    write_text(folder / "config.json", json.dumps(config, indent=2) + "\n")


def load_memory_model(
    folder: str | Path, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> TitanModel:
    """The model of a folder, ready for inference; in the dtype of its file unless another is asked for."""
    folder = Path(folder)
    config = read_memory_config(folder)
    try:
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{str(folder / WEIGHTS)!r} cannot be read: {str(error).rstrip('.')}.") from error
    with torch.device("meta"):
        model = TitanModel(config)
    expected = {name: tensor for name, tensor in model.state_dict().items() if not _is_tied(name, model)}
    for name in sorted(expected.keys() ^ tensors.keys()):
        where = "misses" if name in expected else "has, and its config.json does not,"
        raise ModelError(f"{str(folder / WEIGHTS)!r} {where} {name!r}.")
    for name, tensor in expected.items():
        if tensors[name].shape != tensor.shape:
            shapes = f"{tuple(tensors[name].shape)}, and its config.json says {tuple(tensor.shape)}"
            raise ModelError(f"{str(folder / WEIGHTS)!r} has {name!r} of shape {shapes}.")
    if config.tied_embeddings:
        tensors["head.weight"] = tensors["embedding.weight"]
    model.load_state_dict(tensors, assign=True)
    if config.tied_embeddings:
        model.head.weight = model.embedding.weight
    return model.to(device=device, dtype=dtype).eval().requires_grad_(False)


def read_memory_config(folder: Path) -> TitanConfig:
    path = folder / "config.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{str(path)!r} cannot be read: {str(error).rstrip('.')}.") from error
    if (
        not isinstance(found, dict)
        or found.get("model_type") != MODEL_TYPE
        or not isinstance(found.get("memory"), dict)
    ):
        raise ModelError(f"{str(path)!r} is not the config of a memory model.")
    return TitanConfig.from_dict(found["memory"])


def _is_tied(name: str, model: TitanModel) -> bool:
    return name == "head.weight" and model.config.tied_embeddings

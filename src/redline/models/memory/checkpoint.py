"""A memory model on disk: `config.json` and `model.safetensors` in one folder, every name and shape checked."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as to_safetensors

from redline.errors import ModelError
from redline.models.decoder.checkpoint import SINGLE, Weights, read_json, write_model
from redline.models.memory.config import TitanConfig
from redline.models.memory.model import TitanModel

MODEL_TYPE = "redline_memory"


def save_memory_model(model: TitanModel, folder: str | Path, about: dict[str, Any] | None = None) -> None:
    """`about` goes into config.json beside the model's own settings: the token that ends a text, for one."""
    # Tied weights are one parameter under two names: kept once.
    tensors = {name: weight.detach().contiguous() for name, weight in model.named_parameters()}
    config = {"model_type": MODEL_TYPE, **(about or {}), "memory": model.config.to_dict()}
    write_model(Path(folder), [(SINGLE, to_safetensors(tensors))], config)


def load_memory_model(
    folder: str | Path, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> TitanModel:
    """The model of a folder, ready for inference; in the dtype of its file unless another is asked for."""
    folder = Path(folder)
    config = read_memory_config(folder)
    weights = Weights.of(folder)
    weights.check_layers(config.layers)
    weights.check(dict(shapes(config)))
    with torch.device("meta"):
        model = TitanModel(config).to(dtype or weights.dtype)
    model.to_empty(device=device)
    model.tie()
    weights.fill(dict(model.named_parameters()))
    return model.eval().requires_grad_(False)


def read_memory_config(folder: Path) -> TitanConfig:
    path = folder / "config.json"
    found = read_json(path)
    if found.get("model_type") != MODEL_TYPE or not isinstance(found.get("memory"), dict):
        raise ModelError(f"{str(path)!r} is not the config of a memory model.")
    return TitanConfig.from_dict(found["memory"])


def shapes(config: TitanConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every weight of such a model, without building it: a config.json may say any size."""
    width, hidden = config.width, config.feed_forward_width
    yield "embedding.weight", (config.vocabulary, width)
    for layer in range(config.layers):
        block = f"blocks.{layer}"
        yield f"{block}.mixer_norm.weight", (width,)
        mixer = _attention(config) if config.is_attention(layer) else _neural_memory(config)
        for name, shape in mixer.items():
            yield f"{block}.mixer.{name}", shape
        yield f"{block}.feed_forward_norm.weight", (width,)
        yield f"{block}.feed_forward.gate_up.weight", (2 * hidden, width)
        yield f"{block}.feed_forward.down.weight", (width, hidden)
    yield "norm.weight", (width,)
    if not config.tied_embeddings:
        yield "head.weight", (config.vocabulary, width)


def _attention(config: TitanConfig) -> dict[str, tuple[int, ...]]:
    width, channels = config.width, 2 * config.shared_heads * config.head_dim
    found = {
        "convolution": (config.convolution, channels),
        "query.weight": (width, width),
        "key_value.weight": (channels, width),
        "out.weight": (width, width),
    }
    return {**found, "score.weight": (1, channels), "score.bias": (1,)} if config.memory_slots else found


def _neural_memory(config: TitanConfig) -> dict[str, tuple[int, ...]]:
    width, heads, values = config.width, config.neural_heads, config.neural_heads * config.value_dim
    channels = 2 * heads * config.key_dim + values
    updates: dict[str, dict[str, tuple[int, ...]]] = {
        "gated_delta": {
            "log_rate": (heads,),
            "decay_bias": (heads,),
            "decay.weight": (heads, width),
            "strength.weight": (heads, width),
        },
        "titans": {"forgetting_bias": (heads,), "gates.weight": (3 * heads, width)},
    }
    return {
        "convolution": (config.convolution, channels),
        "query_key_value.weight": (channels, width),
        **{f"update.{name}": shape for name, shape in updates[config.memory_update].items()},
        "gate.weight": (values, width),
        "norm.weight": (config.value_dim,),
        "out.weight": (width, values),
    }

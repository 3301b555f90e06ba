"""Reads a model folder in the Hugging Face layout: the model, its tokenizer and its stop tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from redline.errors import ModelError
from redline.files.untrusted import reading
from redline.generation.hub_cache import find_model
from redline.models import MEMORY_MODEL
from redline.models.decoder import load_decoder
from redline.models.decoder.checkpoint import check_has_weights, read_json
from redline.models.decoder.hugging_face import FAMILIES

Loader = Callable[[Path, torch.dtype, torch.device, bool], nn.Module]


def _load_memory_model(path: Path, dtype: torch.dtype, device: torch.device, strict: bool) -> nn.Module:
    """Ignores `strict`: the config.json of a memory model has Redline's own format and is always read strictly."""
    # Imported here, because the import takes two seconds that other models do not need.
    from redline.models.memory import load_memory_model

    return load_memory_model(path, dtype, device)


# Keyed by `model_type` in config.json.
LOADERS: dict[str, Loader] = {**dict.fromkeys(FAMILIES, load_decoder), MEMORY_MODEL: _load_memory_model}


@dataclass(frozen=True)
class ModelFolder:
    """A model folder before its weights are read."""

    path: Path
    model_type: str
    tokenizer: Any
    # The size of the tokenizer's vocabulary, which may be smaller than the model's.
    tokens: int
    stop_tokens: tuple[int, ...]

    @classmethod
    def open(cls, path: str | Path) -> "ModelFolder":
        """Reads everything but the weights, from a folder or from a model in the Hugging Face cache."""
        path = find_model(path)
        config = read_config(path)
        model_type = check_architecture(path, config)
        check_has_weights(path)
        tokenizer = read_tokenizer(path)
        # Fine-tunes often add a padding token beyond the model's vocabulary. Added tokens are checked in each prompt.
        numbers = tokenizer.get_vocab(with_added_tokens=False).values()
        tokens, vocabulary = max(numbers, default=-1) + 1, find_vocabulary(config)
        if vocabulary is not None and tokens > vocabulary:
            raise ModelError(
                f"the tokenizer in {str(path)!r} has {tokens:,} tokens, and its model's vocabulary is {vocabulary:,}."
            )
        known = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        return cls(path, model_type, tokenizer, known, find_stop_tokens(path, config))

    @property
    def has_memory(self) -> bool:
        """Whether the model has neural memory, whose state can be saved and continued."""
        return self.model_type == MEMORY_MODEL

    def load(self, dtype: torch.dtype, device: torch.device, strict: bool = False) -> nn.Module:
        """Reads the weights. With `strict`, unknown keys of config.json are errors."""
        return LOADERS[self.model_type](self.path, dtype, device, strict)


def check_architecture(folder: Path, config: dict[str, Any]) -> str:
    """Returns the `model_type` of a config.json, or raises if no loader knows it."""
    model_type = str(config.get("model_type"))
    if model_type not in LOADERS:
        raise ModelError(f"{str(folder)!r} has the unknown architecture {model_type!r} (known: {', '.join(LOADERS)}).")
    return model_type


def read_config(folder: Path) -> dict[str, Any]:
    """Returns config.json, or raises an error that says what the folder contains instead of a model."""
    inside = folder / "model"
    if not (folder / "config.json").exists() and (inside / "config.json").exists():
        raise ModelError(f"{str(folder)!r} is the folder of a training: use the model in {str(inside)!r}.")
    if not (folder / "config.json").exists():
        if (folder / "adapter_config.json").exists():
            raise ModelError(
                f"{str(folder)!r} holds an adapter (LoRA), not a model: merge it into its base model, by peft's "
                "merge_and_unload(), and save that."
            )
        raise ModelError(f"{str(folder)!r} is not a model folder: it has no config.json.")
    return read_json(folder / "config.json")


def read_tokenizer(folder: Path) -> Any:
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    if not path.exists():
        advice = ""
        if others := [name for name in ("tokenizer.model", "vocab.json", "vocab.txt") if (folder / name).exists()]:
            convert = f"T.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
            advice = (
                f", only {others[0]}: convert it with "
                f'`python -c "from transformers import AutoTokenizer as T; {convert}"`'
            )
        raise ModelError(f"{str(folder)!r} has no tokenizer.json, which turns text into tokens{advice}.")
    with reading(path, "tokenizer", ModelError, (Exception,)):  # the library raises a bare Exception
        tokenizer = Tokenizer.from_file(str(path))
    # tokenizer.json stores the truncation and padding of its training; prompts are not truncated or padded.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    # tokenizer_config.json says whether names of special tokens in a text become tokens; transformers reads it too.
    settings = folder / "tokenizer_config.json"
    tokenizer.encode_special_tokens = settings.exists() and read_json(settings).get("split_special_tokens") is True
    return tokenizer


def find_vocabulary(config: dict[str, Any]) -> int | None:
    """Returns the vocabulary size, or None if config.json has none; the model's loader raises then."""
    memory = config.get("memory")
    found = memory.get("vocabulary") if isinstance(memory, dict) else config.get("vocab_size")
    return found if isinstance(found, int) else None


def find_stop_tokens(folder: Path, config: dict[str, Any]) -> tuple[int, ...]:
    """Returns the ids of the stop tokens; generation_config.json takes precedence, as chat models set theirs there."""
    settings = folder / "generation_config.json"
    found = read_json(settings).get("eos_token_id") if settings.exists() else None
    if found is None:
        found = config.get("eos_token_id")
    tokens = found if isinstance(found, list) else [] if found is None else [found]
    if not all(isinstance(token, int) for token in tokens):
        raise ModelError(f"{str(folder)!r} has an eos_token_id that is not a token id: {found!r}.")
    return tuple(tokens)

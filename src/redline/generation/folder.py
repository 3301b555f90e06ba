"""A model's folder in the Hugging Face layout: the model, its tokenizer, and the tokens that end a text."""

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
    """Its config.json is Redline's own, and read strictly in any case."""
    # Two seconds that a plain decoder, or a question for help, need not wait.
    from redline.models.memory import load_memory_model

    return load_memory_model(path, dtype, device)


# By `model_type` in config.json.
LOADERS: dict[str, Loader] = {**dict.fromkeys(FAMILIES, load_decoder), MEMORY_MODEL: _load_memory_model}


@dataclass(frozen=True)
class ModelFolder:
    """What is known before the weights are read."""

    path: Path
    model_type: str
    tokenizer: Any
    # How many tokens the tokenizer knows, which may be fewer than its model has rows for.
    tokens: int
    stop_tokens: tuple[int, ...]

    @classmethod
    def open(cls, path: str | Path) -> "ModelFolder":
        """Reads all but the weights of a folder, or of a model in the Hugging Face cache."""
        path = find_model(path)
        config = read_config(path)
        model_type = str(config.get("model_type"))
        if model_type not in LOADERS:
            known = ", ".join(LOADERS)
            raise ModelError(f"{str(path)!r} is of the architecture {model_type!r}, which is not known: {known} are.")
        check_has_weights(path)
        tokenizer = read_tokenizer(path)
        # Fine-tunes often add a token for padding, which no prompt holds: those are looked at in the prompt itself.
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
        """Whether its model has a long-term memory, which can be carried on."""
        return self.model_type == MEMORY_MODEL

    def load(self, dtype: torch.dtype, device: torch.device, strict: bool = False) -> nn.Module:
        """`strict` refuses every key of config.json that is not known."""
        return LOADERS[self.model_type](self.path, dtype, device, strict)


def read_config(folder: Path) -> dict[str, Any]:
    """A model's config.json; a training, whose model lies in a folder of its own, is told apart."""
    inside = folder / "model"
    if not (folder / "config.json").exists() and (inside / "config.json").exists():
        raise ModelError(f"{str(folder)!r} is the folder of a training: its model is in {str(inside)!r}.")
    if not (folder / "config.json").exists():
        if (folder / "adapter_config.json").exists():
            raise ModelError(
                f"{str(folder)!r} holds an adapter (LoRA), not a model: merge it into its base model, by peft's "
                "merge_and_unload(), and save that."
            )
        raise ModelError(f"{str(folder)!r} is not the folder of a model: it has no config.json.")
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
    # The file keeps how its training cut and filled texts; a prompt is taken as it is.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    # Nor does it keep whether the name of a special token in a text is that token; transformers look here too.
    settings = folder / "tokenizer_config.json"
    tokenizer.encode_special_tokens = settings.exists() and read_json(settings).get("split_special_tokens") is True
    return tokenizer


def find_vocabulary(config: dict[str, Any]) -> int | None:
    """None where `config.json` does not say it, which the model's loader refuses."""
    memory = config.get("memory")
    found = memory.get("vocabulary") if isinstance(memory, dict) else config.get("vocab_size")
    return found if isinstance(found, int) else None


def find_stop_tokens(folder: Path, config: dict[str, Any]) -> tuple[int, ...]:
    """`generation_config.json` counts before `config.json`: chat models add their end of turn there."""
    settings = folder / "generation_config.json"
    found = read_json(settings).get("eos_token_id") if settings.exists() else None
    if found is None:
        found = config.get("eos_token_id")
    tokens = found if isinstance(found, list) else [] if found is None else [found]
    if not all(isinstance(token, int) for token in tokens):
        raise ModelError(f"{str(folder)!r} has an 'eos_token_id' that is no token: {found!r}.")
    return tuple(tokens)

"""Reads a model folder in the Hugging Face layout: the model, its tokenizer and its stop tokens.

The folder may be in the local cache of the Hugging Face Hub, where `hf download` and transformers store models.
"""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from redline.errors import ModelError
from redline.files.untrusted import reading
from redline.models import MEMORY_MODEL
from redline.models.decoder import load_decoder
from redline.models.decoder.bundled import DEFAULT, bundled_language_model, bundled_language_models
from redline.models.decoder.checkpoint import check_has_weights, read_json
from redline.models.decoder.hugging_face import FAMILIES

# Matches OWNER/NAME (old models such as gpt2 have no owner), optionally followed by @ and a branch, tag or commit.
_REPOSITORY = re.compile(r"(?P<name>([A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*)(@(?P<revision>[A-Za-z0-9][\w./-]*))?")
_SHORTEST_COMMIT = 7
# The patterns of the files that a complete download contains: at least one file for each part. Whether a file can be
# read is checked when it is loaded.
_PARTS = {
    "config.json": ("config.json",),
    "weights": ("*.safetensors", "*.bin"),
    "tokenizer": ("tokenizer.json", "tokenizer.model", "vocab.*"),
}
Loader = Callable[[Path, torch.dtype, torch.device, bool], nn.Module]


def _load_memory_model(path: Path, dtype: torch.dtype, device: torch.device, strict: bool) -> nn.Module:
    """Ignores `strict`: the config.json of a memory model has Redline's own format and is always read strictly."""
    # Imported here, because the import takes two seconds that other models do not need.
    from redline.models.memory import load_memory_model

    return load_memory_model(path, dtype, device)


# Maps the `model_type` of config.json to the function that loads such models.
LOADERS: dict[str, Loader] = {**dict.fromkeys(FAMILIES, load_decoder), MEMORY_MODEL: _load_memory_model}


@dataclass(frozen=True)
class ModelFolder:
    """A model folder whose config and tokenizer have been read, but not its weights."""

    path: Path
    model_type: str
    tokenizer: Any
    # The size of the tokenizer's vocabulary with added tokens. The model's vocabulary may have a different size.
    tokens: int
    stop_tokens: tuple[int, ...]

    @classmethod
    def open(cls, path: str | Path | None) -> "ModelFolder":
        """Finds a model (see `find_model`), and reads everything but its weights."""
        path = find_model(path)
        config = read_config(path)
        model_type = check_architecture(path, config)
        check_has_weights(path)
        tokenizer = read_tokenizer(path)
        # Added tokens are not counted, because fine-tunes often add a padding token beyond the model's vocabulary.
        # Such a token is an error only if a prompt contains it.
        numbers = tokenizer.get_vocab(with_added_tokens=False).values()
        memory = config.get("memory")
        vocabulary = memory.get("vocabulary") if isinstance(memory, dict) else config.get("vocab_size")
        tokens = max(numbers, default=-1) + 1
        # If config.json has no vocabulary size, loading the model raises an error later.
        if isinstance(vocabulary, int) and tokens > vocabulary:
            raise ModelError(
                f"the tokenizer in {str(path)!r} has {tokens:,} tokens, and its model's vocabulary is {vocabulary:,}."
            )
        known = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        return cls(path, model_type, tokenizer, known, find_stop_tokens(path, config))

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
        raise ModelError(f"{str(folder)!r} is the output folder of a training run: use the model in {str(inside)!r}.")
    if not (folder / "config.json").exists():
        if (folder / "adapter_config.json").exists():
            raise ModelError(
                f"{str(folder)!r} holds an adapter (LoRA), not a model: merge it into its base model with peft's "
                "merge_and_unload(), and save the result."
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
        raise ModelError(f"{str(folder)!r} has no tokenizer.json (the file that defines the tokenizer){advice}.")
    with reading(path, "tokenizer", ModelError, (Exception,)):  # the library raises a bare Exception
        tokenizer = Tokenizer.from_file(str(path))
    # tokenizer.json may enable the truncation and padding that were used in training; prompts need neither.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    # With split_special_tokens, the name of a special token in a text is encoded as plain text, as in transformers.
    settings = folder / "tokenizer_config.json"
    tokenizer.encode_special_tokens = settings.exists() and read_json(settings).get("split_special_tokens") is True
    return tokenizer


def find_stop_tokens(folder: Path, config: dict[str, Any]) -> tuple[int, ...]:
    """Returns the ids of the stop tokens. generation_config.json, which chat models use, overrides config.json."""
    settings = folder / "generation_config.json"
    found = read_json(settings).get("eos_token_id") if settings.exists() else None
    if found is None:
        found = config.get("eos_token_id")
    tokens = found if isinstance(found, list) else [] if found is None else [found]
    if not all(isinstance(token, int) for token in tokens):
        raise ModelError(f"{str(folder)!r} has an eos_token_id that is not a token id: {found!r}.")
    return tuple(tokens)


def cache_folder() -> Path:
    """Returns the cache folder of huggingface_hub.

    It is $HF_HUB_CACHE, else $HF_HOME/hub, else huggingface/hub in $XDG_CACHE_HOME (default: ~/.cache).
    """
    if named := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(named).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("HF_HOME") or Path(cache) / "huggingface").expanduser() / "hub"


def find_model(given: str | Path | None) -> Path:
    """Returns `given` if it is a folder, otherwise the bundled model of that name or the snapshot of a cached model.

    None stands for the bundled model that is used by default. If there is no such model, raises a ModelError with the
    command that downloads it.
    """
    if given is None:
        return bundled_language_model()
    path = Path(given)
    if path.is_dir():
        return path
    if str(given) == DEFAULT or str(given) in bundled_language_models():
        return bundled_language_model(str(given))
    needed = "config.json, model.safetensors and tokenizer.json"
    if path.exists():
        raise ModelError(f"{str(given)!r} is a file: give the folder of a model, with {needed}.")
    named = _REPOSITORY.fullmatch(str(given).rstrip("/"))
    if named is None:
        raise ModelError(
            f"there is no folder {str(given)!r}: give a folder with {needed}, or the name of a model in the Hugging "
            "Face cache, such as Qwen/Qwen3-0.6B."
        )
    name, revision = named["name"], named["revision"]
    cache = cache_folder()
    folder = cache / f"models--{name.replace('/', '--')}"
    download = f"hf download {name}" + (f" --revision {revision}" if revision else "")
    snapshot = _snapshot(folder, revision)
    if snapshot is None:
        raise ModelError(
            f"there is no folder {str(given)!r}, and no such model in the Hugging Face cache {str(cache)!r}: download "
            f"it with `{download}`, or give a folder with {needed}."
        )
    for part, patterns in _PARTS.items():
        # `exists` follows symbolic links: the cache consists of links, and their targets may be missing.
        if not any(path.exists() for pattern in patterns for path in snapshot.glob(pattern)):
            raise ModelError(
                f"the copy of {name} in the Hugging Face cache has no {part}: download all of it with `{download}` "
                f"({str(snapshot)!r})."
            )
    return snapshot


def _snapshot(folder: Path, revision: str | None) -> Path | None:
    """Returns the snapshot of a branch, tag or commit prefix; by default that of main, or the only snapshot."""
    snapshots = folder / "snapshots"
    reference = folder / "refs" / (revision or "main")
    if ".." not in reference.parts and reference.is_file():
        commit = reference.read_text(encoding="utf-8", errors="replace").strip()
        return snapshots / commit if re.fullmatch(r"\w{1,64}", commit) and (snapshots / commit).is_dir() else None
    there = [one for one in sorted(snapshots.glob("*")) if one.is_dir()]
    if revision is None:
        return there[0] if len(there) == 1 else None
    if len(revision) < _SHORTEST_COMMIT:
        return None
    matching = [one for one in there if one.name.startswith(revision)]
    return matching[0] if len(matching) == 1 else None

"""A local folder with a diffusers image-to-image model, SD-Turbo and its kind.

diffusers and transformers read the parts, from safetensors on this disk alone; what runs is ours. No code of the folder
runs, and parts other than those known here are refused. Prompts are read in main memory.
"""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from redline.errors import ModelError, RedlineError
from redline.files.untrusted import read_json_object
from redline.ladder.plan import Plan
from redline.quiet import quiet
from redline.stream.memory_check import check_weights_fit
from redline.stream.pipeline_frames import PipelineFrames

PIPELINE = "model_index.json"
_PARTS = {
    "unet": ("UNet2DConditionModel",),
    "vae": ("AutoencoderKL", "AutoencoderTiny"),
    "text_encoder": ("CLIPTextModel",),
    "tokenizer": ("CLIPTokenizer", "CLIPTokenizerFast"),
}
# Either of these: without them transformers makes a tokenizer that knows no word, and says nothing.
_WORDS = (("tokenizer.json",), ("vocab.json", "merges.txt"))


def load_pipeline(folder: Path, plan: Plan, device: torch.device | str) -> PipelineFrames:
    """The networks under the plan on the device; nothing is fetched."""
    index = _index(folder)
    missing = [name for name in ("diffusers", "transformers") if find_spec(name) is None]
    if missing:
        needs = " and ".join(missing)
        raise RedlineError(f"a pipeline is read with {needs}, not installed here: pip install 'redline[diffusers]'.")
    name = f"the pipeline {folder.name!r}"
    parts: dict[str, Any] = {}
    check_weights_fit(_weights(folder), name, torch.device(device))
    with quiet():
        for part in ("unet", "vae"):
            parts[part] = _read(folder, part, "diffusers", index).float().eval().requires_grad_(False)
        sees, holds = parts["unet"].config.in_channels, parts["vae"].config.latent_channels
        if sees != holds:
            raise ModelError(
                f"the unet of {str(folder)!r} takes {sees} channels and its vae gives {holds}: it needs more than a "
                "picture."
            )
        read_prompt = _prompt_reader(folder, index)
        scheduler = _read(folder, "scheduler", "diffusers", index)
    return PipelineFrames(parts, read_prompt, scheduler, plan, torch.device(device), name)


def _index(folder: Path) -> dict[str, str]:
    """The class of each part."""
    found = read_json_object(folder / PIPELINE, "pipeline", ModelError)
    index = {part: str(entry[1]) for part, entry in found.items() if isinstance(entry, list) and len(entry) == 2}
    for part, known in _PARTS.items():
        if index.get(part) not in known:
            has = index.get(part) or "none"
            raise ModelError(
                f"{str(folder)!r} is no pipeline of the kind of SD-Turbo: its {part} is {has}, not {known[0]}."
            )
    if "text_encoder_2" in index:
        raise ModelError(
            f"{str(folder)!r} is of the kind of SDXL, with two text encoders; those with one are run here."
        )
    if "Scheduler" not in index.get("scheduler", ""):
        raise ModelError(f"{str(folder)!r} is no pipeline: it has no scheduler.")
    return index


def _read(folder: Path, part: str, library: str, index: dict[str, str]) -> Any:
    kind = getattr(import_module(library), index[part], None)
    if kind is None:
        raise ModelError(f"the {part} of {str(folder)!r} is {index[part]}, which this {library} does not know.")
    options = {} if part in ("scheduler", "tokenizer") else {"use_safetensors": True, **_variant(folder / part)}
    try:
        return kind.from_pretrained(str(folder / part), local_files_only=True, **options)
    except Exception as error:  # many kinds, depending on what is damaged
        why = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise ModelError(f"the {part} of {str(folder)!r} cannot be read: {why}.") from error


def _variant(folder: Path) -> dict[str, str]:
    """Many folders hold their weights in half precision alone, under names of their own."""
    names = [path.name for path in folder.glob("*.safetensors")]
    return {"variant": "fp16"} if names and all(".fp16" in name for name in names) else {}


def _weights(folder: Path) -> list[Path]:
    """Those that are read, of what a folder may hold twice."""
    found = []
    for part in ("unet", "vae", "text_encoder"):
        is_half = bool(_variant(folder / part))
        found += [path for path in (folder / part).glob("*.safetensors") if (".fp16" in path.name) == is_half]
    return found


def _prompt_reader(folder: Path, index: dict[str, str]) -> Callable[[str], Tensor]:
    if not any(all((folder / "tokenizer" / name).is_file() for name in names) for names in _WORDS):
        either = " and no ".join(" with ".join(names) for names in _WORDS)
        raise ModelError(f"the tokenizer of {str(folder)!r} cannot be read: it has no {either}.")
    tokenizer = _read(folder, "tokenizer", "transformers", index)
    encoder = _read(folder, "text_encoder", "transformers", index).float().eval()
    longest = min(int(tokenizer.model_max_length), int(encoder.config.max_position_embeddings))

    @torch.inference_mode()
    def read(prompt: str) -> Tensor:
        tokens = tokenizer(prompt, padding="max_length", max_length=longest, truncation=True, return_tensors="pt")
        return encoder(tokens.input_ids)[0].float()

    return read

"""Loads the model of a stream: LSD weights, the output folder of LSD training, or a diffusers pipeline.

A pipeline is a folder with an image-to-image model such as SD-Turbo. diffusers and transformers load its parts, from
local safetensors files only. Code in the folder is never executed, and unknown parts are refused. The text encoder runs
on the CPU.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module, resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from redline.errors import ModelError, RedlineError, first_line
from redline.files.untrusted import read_json_object
from redline.ladder.plan import Plan
from redline.machine.memory import is_out_of_memory
from redline.machine.quiet import quiet
from redline.models.lsd import load_lsd, read_about
from redline.stream.frame_model import FrameModel
from redline.stream.lsd_frames import LsdFrames
from redline.stream.memory_check import check_weights_fit
from redline.stream.pipeline_frames import PipelineFrames

# The file to which `redline train lsd` writes the weights, in its output folder.
_TRAINED = "model.safetensors"
SHIPPED = Path(str(resources.files("redline.models.lsd"))) / "weights" / "lsd-tiny.safetensors"
PIPELINE = "model_index.json"
_PARTS = {
    "unet": ("UNet2DConditionModel",),
    "vae": ("AutoencoderKL", "AutoencoderTiny"),
    "text_encoder": ("CLIPTextModel",),
    "tokenizer": ("CLIPTokenizer", "CLIPTokenizerFast"),
}
# One of these sets of files must exist, because otherwise transformers silently creates a tokenizer without vocabulary.
_VOCABULARY = (("tokenizer.json",), ("vocab.json", "merges.txt"))


@dataclass(frozen=True)
class LoadedModel:
    """A model with its default `steps` and `strength`; `live_steps` is the default for live streams on this device."""

    frames: FrameModel
    steps: int
    strength: float
    live_steps: int


def load_model(path: Path | None, plan: Plan, device: torch.device | str, sampler: str | None = None) -> LoadedModel:
    """Loads a model, by default the bundled LSD. Raises RedlineError if it is invalid or too large for the memory."""
    path, device = path or SHIPPED, torch.device(device)
    try:
        return _load(path, plan, device, sampler)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        text = f"{str(path)!r} is out of memory on {device} with the plan {plan}: use a smaller model or another plan."
        raise ModelError(text) from error


def _load(path: Path, plan: Plan, device: torch.device, sampler: str | None) -> LoadedModel:
    if (path / PIPELINE).is_file():
        if sampler is not None:
            raise RedlineError("--sampler cannot be combined with a diffusers pipeline, which has its own scheduler.")
        pipeline = load_pipeline(path, plan, device)
        return LoadedModel(pipeline, pipeline.default_steps, 0.5, pipeline.default_steps)
    if path.is_dir():
        if not (path / _TRAINED).is_file():
            raise ModelError(f"{str(path)!r} is not a model folder: it has no {PIPELINE} and no {_TRAINED}.")
        path = path / _TRAINED
    about = read_about(path)
    check_weights_fit([path], repr(str(path)), device, keeps_copy="fp16" in plan)
    frames = LsdFrames(load_lsd(path), plan, device, sampler or "distilled")
    declared = about.get("sample_steps", "")
    steps = int(declared) if declared.isdecimal() else 1
    # A distilled model also supports fewer steps, and on a CPU a live stream needs a single step to be fast enough.
    single = device.type == "cpu" and frames.sampler == "distilled"
    return LoadedModel(frames, steps, 1.0, 1 if single else steps)


def load_pipeline(folder: Path, plan: Plan, device: torch.device | str) -> PipelineFrames:
    """Loads the pipeline onto the device and applies the plan. Downloads nothing."""
    index = _index(folder)
    missing = [name for name in ("diffusers", "transformers") if find_spec(name) is None]
    if missing:
        needs = " and ".join(missing)
        raise RedlineError(f"a diffusers pipeline needs {needs}: pip install 'redline[diffusers]'.")
    name = f"the pipeline {folder.name!r}"
    parts: dict[str, Any] = {}
    check_weights_fit(_weights(folder), name, torch.device(device))
    with quiet():
        for part in ("unet", "vae"):
            parts[part] = _read(folder, part, "diffusers", index).float().eval().requires_grad_(False)
        unet_channels, vae_channels = parts["unet"].config.in_channels, parts["vae"].config.latent_channels
        if unet_channels != vae_channels:
            raise _unsupported(folder, f"its unet takes {unet_channels} channels, but its vae returns {vae_channels}")
        read_prompt = _prompt_reader(folder, index)
        scheduler = _read(folder, "scheduler", "diffusers", index)
    return PipelineFrames(parts, read_prompt, scheduler, plan, torch.device(device), name)


def _index(folder: Path) -> dict[str, str]:
    """Returns the class name of each part of the pipeline. Raises ModelError if the pipeline is not supported."""
    found = read_json_object(folder / PIPELINE, "pipeline", ModelError)
    index = {part: str(entry[1]) for part, entry in found.items() if isinstance(entry, list) and len(entry) == 2}
    for part, known in _PARTS.items():
        if index.get(part) not in known:
            has = index.get(part) or "none"
            raise _unsupported(folder, f"its {part} is {has}, not {known[0]} as in SD-Turbo")
    if "text_encoder_2" in index:
        raise _unsupported(folder, "it has two text encoders, as SDXL has; only one is supported")
    if "Scheduler" not in index.get("scheduler", ""):
        raise _unsupported(folder, "it has no scheduler")
    return index


def _unsupported(folder: Path, why: str) -> ModelError:
    return ModelError(f"unsupported pipeline {str(folder)!r}: {why}.")


def _read(folder: Path, part: str, library: str, index: dict[str, str]) -> Any:
    kind = getattr(import_module(library), index[part], None)
    if kind is None:
        lacks = f"which the installed {library} does not have"
        raise ModelError(f"the {part} of {str(folder)!r} is {index[part]}, {lacks}.")
    options = {} if part in ("scheduler", "tokenizer") else {"use_safetensors": True, **_variant(folder / part)}
    try:
        return kind.from_pretrained(str(folder / part), local_files_only=True, **options)
    except Exception as error:  # the exception type depends on the damage
        raise ModelError(f"the {part} of {str(folder)!r} cannot be read: {first_line(error)}.") from error


def _variant(folder: Path) -> dict[str, str]:
    """Selects the fp16 variant if the folder has no other weights."""
    names = [path.name for path in folder.glob("*.safetensors")]
    return {"variant": "fp16"} if names and all(".fp16" in name for name in names) else {}


def _weights(folder: Path) -> list[Path]:
    """Returns the weight files to load. If a folder has fp32 and fp16 variants, only fp32 is loaded."""
    parts = [folder / part for part in ("unet", "vae", "text_encoder")]
    files = [path for part in parts for path in part.glob("*.safetensors")]
    return [path for path in files if (".fp16" in path.name) == bool(_variant(path.parent))]


def _prompt_reader(folder: Path, index: dict[str, str]) -> Callable[[str], Tensor]:
    if not any(all((folder / "tokenizer" / name).is_file() for name in names) for names in _VOCABULARY):
        either = " and no ".join(" with ".join(names) for names in _VOCABULARY)
        raise ModelError(f"the tokenizer of {str(folder)!r} cannot be read: it has no {either}.")
    tokenizer = _read(folder, "tokenizer", "transformers", index)
    encoder = _read(folder, "text_encoder", "transformers", index).float().eval()
    longest = min(int(tokenizer.model_max_length), int(encoder.config.max_position_embeddings))

    @torch.inference_mode()
    def read(prompt: str) -> Tensor:
        tokens = tokenizer(prompt, padding="max_length", max_length=longest, truncation=True, return_tensors="pt")
        return encoder(tokens.input_ids)[0].float()

    return read

"""Loads the model of a stream: LSD weights, the output folder of their training, or a diffusers pipeline."""

from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import torch

from redline.errors import ModelError, RedlineError
from redline.ladder.plan import Plan
from redline.machine.memory import is_out_of_memory
from redline.models.lsd import load_lsd, read_about
from redline.stream.diffusers_folder import PIPELINE, load_pipeline
from redline.stream.frame_model import FrameModel
from redline.stream.lsd_frames import LsdFrames
from redline.stream.memory_check import check_weights_fit

# The file to which `redline train lsd` writes the weights, in its output folder.
_TRAINED = "model.safetensors"
SHIPPED = Path(str(resources.files("redline.models.lsd"))) / "weights" / "lsd-tiny.safetensors"


@dataclass(frozen=True)
class LoadedModel:
    """`steps` and `strength` are the model's defaults; `live_steps` is the default of a live stream on this device."""

    frames: FrameModel
    steps: int
    strength: float
    live_steps: int


def load_model(path: Path | None, plan: Plan, device: torch.device | str, sampler: str | None = None) -> LoadedModel:
    """Loads a model, by default the shipped one. Raises RedlineError if it is invalid or too large for the memory."""
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

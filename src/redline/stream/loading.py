"""The model of a stream, from what was given: an LSD's weights, the folder of its training, or a diffusers pipeline."""

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

# What `redline train lsd` leaves in its folder.
_TRAINED = "model.safetensors"
_USUAL_STEPS = 1
SHIPPED = Path(str(resources.files("redline.models.lsd"))) / "weights" / "lsd-tiny.safetensors"


@dataclass(frozen=True)
class Loaded:
    """`steps` and `strength` are those that it was made for; `live_steps` are those with which it is live here."""

    frames: FrameModel
    plan: Plan
    steps: int
    strength: float
    live_steps: int


def load_model(path: Path | None, plan: Plan, device: torch.device | str, sampler: str | None = None) -> Loaded:
    """Without a path the model that is shipped. One that does not fit is told, mostly before it is read."""
    found, device = SHIPPED if path is None else path, torch.device(device)
    try:
        return _loaded(found, plan, device, sampler)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        text = f"{str(found)!r} does not fit on {device} with the plan {plan}: take a smaller model, or another plan."
        raise ModelError(text) from error


def _loaded(found: Path, plan: Plan, device: torch.device, sampler: str | None) -> Loaded:
    if (found / PIPELINE).is_file():
        if sampler is not None:
            raise RedlineError("a diffusers pipeline brings its own scheduler: leave out --sampler.")
        pipeline = load_pipeline(found, plan, device)
        return Loaded(pipeline, pipeline.plan, pipeline.usual_steps, 0.5, pipeline.usual_steps)
    if found.is_dir():
        if not (found / _TRAINED).is_file():
            raise ModelError(f"{str(found)!r} is no pipeline and no training: it has no {PIPELINE} and no {_TRAINED}.")
        found = found / _TRAINED
    about = read_about(found)
    check_weights_fit([found], repr(str(found)), device, in_both="fp16" in plan)
    model = load_lsd(found)
    frames = LsdFrames(model, plan, device, sampler or "distilled")
    said = about.get("sample_steps", "")
    steps = int(said) if said.isdecimal() else _USUAL_STEPS
    # A distilled model is trained for every number of steps up to its own, and a CPU is live with one.
    once = device.type == "cpu" and frames.sampler == "distilled"
    return Loaded(frames, frames.plan, steps, 1.0, 1 if once else steps)

"""Writes the result of training an image model: a weight file and a model card.

The weights are rounded to the dtype in which they are stored before they are scored.
"""

import copy
import json
import platform
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from redline.errors import RedlineError
from redline.files.atomic import write_text
from redline.machine.version import VERSION
from redline.notation import format_bytes
from redline.pages import render_text
from redline.training.loop import Outcome
from redline.training.photos import PhotoTask, folder_name

WEIGHTS, CARD = "model.safetensors", "model-card.md"
DTYPES = {"fp16": torch.float16, "fp32": torch.float32}
M = TypeVar("M", bound=nn.Module)
_LICENCE_NAMES = ("licence", "license", "copying")
_MOST_CHARACTERS = 4000


@dataclass(frozen=True)
class ImageResult:
    """The files of a trained image model, and its scores by test set.

    `bicubic` holds the scores of bicubic upscaling, for a super-resolution model; `stage` is the last stage of
    training, for a live video model.
    """

    weights: Path
    card: Path
    model_bytes: int
    parameters: int
    scores: dict[str, Any]
    bicubic: dict[str, Any] = field(default_factory=dict)
    stage: str = ""


def write_result(task: PhotoTask, outcome: Outcome, out: Path) -> ImageResult:
    """Scores the averaged weights as they will be stored, then writes weights and model card."""
    settings, stored = task.settings.to_dict(), task.settings.model.weights
    model: Any = as_stored(outcome.model, DTYPES[stored])
    scores, about = task.score_result(model)
    about |= {
        "made_by": f"redline {VERSION}",
        "model": str(model.config),
        "settings": json.dumps(settings),
        "data": f"{task.pairs.photos} photos, {task.pairs.pixels / 1e6:.1f} megapixels",
        "steps": str(outcome.position.step),
        "seconds": f"{outcome.position.elapsed_s:.0f}",
    }
    task.save(model, out / WEIGHTS, DTYPES[stored], about)
    size = (out / WEIGHTS).stat().st_size
    parameters = sum(weight.numel() for weight in model.parameters())
    result = ImageResult(out / WEIGHTS, out / CARD, size, parameters, **scores)
    card = render_text(
        "redline.training",
        task.card,
        task=task,
        outcome=outcome,
        model=model,
        result=result,
        settings=settings,
        settings_json=json.dumps(settings, indent=2),
        stored=f"{parameters:,} parameters, {format_bytes(size)} as {stored} safetensors",
        device=device_name(task.device),
        torch=torch.__version__,
        licence=licence_section(task.settings.data.photos),
        folder_name=folder_name,
    )
    write_text(out / CARD, card)
    return result


@torch.no_grad()
def as_stored(model: M, dtype: torch.dtype) -> M:
    """Returns a copy of the model whose weights are rounded to `dtype`, as if they were stored and read back."""
    result = copy.deepcopy(model).eval()
    for weight in result.parameters():
        weight.copy_(weight.to(dtype).float())
        if not torch.isfinite(weight).all():
            raise RedlineError('a weight is too large for fp16: set weights = "fp32" under [model].')
    return result


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"a CPU ({platform.machine()})"


def licence_section(photos: str) -> str:
    """Quotes the licence file in the folder of photos, or says that there is none."""
    folder = Path(photos)
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    found = next((path for path in files if path.is_file() and path.name.lower().startswith(_LICENCE_NAMES)), None)
    parts = ["## Licence", "State here under which licence you publish these weights."]
    if found is None:
        parts.append("The folder of photos has no licence file: state here under which terms they were used.")
        return "\n\n".join(parts)
    text = found.read_text(encoding="utf-8", errors="replace")
    quoted = [f"> {line}".rstrip() for line in text[:_MOST_CHARACTERS].strip().splitlines()]
    more = ["> …"] if len(text) > _MOST_CHARACTERS else []
    parts += [f"The licences of the photos, from their file `{found.name}`:", "\n".join([*quoted, *more])]
    return "\n\n".join(parts)

"""Writes the result of a DRCT training: the averaged weights and a model card with their scores.

The weights are rounded to the dtype in which they are stored before they are scored.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

from redline.datasets.photo_pairs import PhotoSettings
from redline.errors import RedlineError
from redline.evaluation.super_resolution import Evaluation
from redline.files.atomic import write_text
from redline.models.drct import Drct, save_drct
from redline.notation import format_bytes, format_seconds
from redline.training.licence import licence_section
from redline.training.loop import Outcome
from redline.training.stored import CARD, DTYPES, WEIGHTS, as_stored, device_name
from redline.training.super_resolution import DrctLoopSettings, DrctTask
from redline.version import VERSION


@dataclass(frozen=True)
class DrctResult:
    weights: Path
    card: Path
    model_bytes: int
    parameters: int
    scores: dict[str, Evaluation]
    bicubic: dict[str, Evaluation]


def write_result(task: DrctTask, outcome: Outcome, out: Path) -> DrctResult:
    """Scores the averaged weights as they will be stored, then writes weights and card."""
    dtype = DTYPES[task.settings.model.weights]
    model = rounded(outcome.model, dtype)
    scores, bicubic = task.evaluate(model), task.evaluate_bicubic()
    config = asdict(task.settings)
    config["training"] = config.pop("loop")
    # The card shows names of folders, not paths.
    config["data"]["photos"] = _name(task.settings.data.photos)
    config["data"]["validation"] = [_name(folder) for folder in task.settings.data.validation]
    config["model"]["start"] = task.start.name if task.start else ""
    about = {
        "made_by": f"redline {VERSION}",
        "model": str(model.config),
        "settings": json.dumps(config),
        "data": f"{task.pairs.photos} photos, {task.pairs.pixels / 1e6:.1f} megapixels",
        "steps": str(outcome.position.step),
        "seconds": f"{outcome.position.elapsed_s:.0f}",
        "scores": json.dumps({_name(name): asdict(seen.mean) for name, seen in scores.items()}),
    }
    if task.start:
        about["start"] = json.dumps(asdict(task.start))
    save_drct(model, out / WEIGHTS, dtype, about)
    size = (out / WEIGHTS).stat().st_size
    parameters = sum(weight.numel() for weight in model.parameters())
    result = DrctResult(out / WEIGHTS, out / CARD, size, parameters, scores, bicubic)
    write_text(out / CARD, _card(task, outcome, model, result, config))
    return result


def rounded(model: nn.Module, dtype: torch.dtype) -> Drct:
    """Returns a copy with weights rounded to `dtype`."""
    if not isinstance(model, Drct):
        raise RedlineError(f"a {type(model).__name__} is not a DRCT.")
    return as_stored(model, dtype)


def _card(
    task: DrctTask, outcome: Outcome, model: Drct, result: DrctResult, config: dict[str, dict[str, object]]
) -> str:
    settings, crops, position = task.settings, task.pairs, outcome.position
    seen = position.step * settings.data.batch
    shape = settings.model
    lines = [
        f"# {model.config}",
        "",
        f"A super-resolution model that enlarges images {shape.scale} times, trained by `redline train drct`.",
        "",
        "## Model",
        "",
        f"Groups {shape.groups}, width {shape.width}, growth {shape.growth}, window {shape.window}: "
        f"{result.parameters:,} parameters, {format_bytes(result.model_bytes)} as {shape.weights} safetensors.",
        "",
        "## Data",
        "",
        f"{crops.photos} photos of the folder `{_name(settings.data.photos)}`, {crops.pixels / 1e6:.1f} megapixels "
        f"{_reduced(settings.data)}. Small images: Matlab's antialiased bicubic. "
        + (f"{settings.data.drawn:.0%} of the crops are of drawn images. " if settings.data.drawn else "")
        + (f"{settings.data.recolour:.0%} of the crops have changed colours. " if settings.data.recolour else "")
        + "No image of the test sets below is among them.",
        "",
        "## Training",
        "",
        f"{position.step:,} steps of {settings.data.batch} crops of {settings.data.crop_px} × {settings.data.crop_px} "
        f"({seen:,} crops) in {format_seconds(position.elapsed_s)} on {device_name(task.device)}, {task.precision}, "
        f"torch {torch.__version__}; {_loss(settings.loop)}, {settings.loop.optimizer}, cosine schedule, "
        f"averaged weights (decay {settings.loop.ema_decay:g}). Peak memory {format_bytes(outcome.peak_bytes)}. "
        + (f"It started from {task.start}." if task.start else "It started as an interpolation."),
        "",
        *_scores(result, shape.scale),
        "## Limits",
        "",
        "The model is trained to undo a clean bicubic reduction. It enlarges noise and artefacts of strong compression "
        "with the image, and does not invent fine texture that the small image lacks.",
        "",
        *licence_section(settings.data.photos),
        "## Settings",
        "",
        "```json",
        json.dumps(config, indent=2),
        "```",
    ]
    return "\n".join(lines) + "\n"


def _reduced(data: PhotoSettings) -> str:
    shrink = f"shrinking by {_listed(data.shrink)}"
    if not data.renew_steps:
        return f"after {shrink}"
    varied = f"factors above 1 times up to {1 + data.vary:g}, new every {data.renew_steps:,} steps"
    return f"before {shrink} ({varied})"


def _loss(loop: DrctLoopSettings) -> str:
    if not loop.frequency_weight:
        return "absolute error"
    since = f" from {loop.frequency_from:.0%} of the steps on" if loop.frequency_from else ""
    return f"absolute error and {loop.frequency_weight:g} times that of the Fourier transform{since}"


def _scores(result: DrctResult, scale: int) -> list[str]:
    if not result.scores:
        return ["## Scores", "", "No test set was given, so nothing was scored.", ""]
    rows = [
        f"| {_name(name)} | {len(seen.images)} | **{seen.mean.psnr_y_db:.2f}** | **{seen.mean.ssim_y:.4f}** "
        f"| {result.bicubic[name].mean.psnr_y_db:.2f} | {result.bicubic[name].mean.ssim_y:.4f} |"
        for name, seen in result.scores.items()
    ]
    return [
        "## Scores",
        "",
        f"PSNR and SSIM of luma, {scale} pixels cut off at each edge, fp32, of the weights as stored.",
        "",
        "| test set | images | PSNR-Y dB | SSIM-Y | bicubic PSNR-Y dB | bicubic SSIM-Y |",
        "| --- | --- | --- | --- | --- | --- |",
        *rows,
        "",
    ]


def _name(folder: str) -> str:
    return Path(folder).resolve().name


def _listed(numbers: tuple[float, ...]) -> str:
    return " and ".join(f"{number:g}" for number in numbers)

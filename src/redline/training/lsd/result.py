"""Writes the result of an LSD training: the averaged weights and a model card with their scores.

The weights are rounded to the dtype in which they are stored before they are scored.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

from redline.errors import RedlineError
from redline.files.atomic import write_text
from redline.models.lsd import Lsd, save_lsd
from redline.notation import format_bytes, format_seconds
from redline.training.licence import licence_section
from redline.training.loop import Outcome
from redline.training.lsd.settings import STAGES
from redline.training.lsd.student_teacher import StudentTeacher
from redline.training.lsd.task import LsdTask
from redline.training.lsd.validation import Restoration
from redline.training.stored import CARD, DTYPES, WEIGHTS, as_stored, device_name
from redline.version import VERSION


@dataclass(frozen=True)
class LsdResult:
    weights: Path
    card: Path
    model_bytes: int
    parameters: int
    stage: str
    scores: dict[str, Restoration]


def write_lsd_result(task: LsdTask, outcome: Outcome, out: Path) -> LsdResult:
    """Scores the averaged weights as they will be stored, over many frames, then writes weights and card."""
    dtype = DTYPES[task.settings.model.weights]
    model = rounded(outcome.model, dtype)
    scores = task.judge(model, task.settings.loop.final_frames)
    named = {Path(folder).resolve().name: seen for folder, seen in scores.items()}
    pairs = task.pairs
    about = {
        "made_by": f"redline {VERSION}",
        "model": str(model.config),
        "settings": json.dumps(task.settings.to_dict()),
        "sample_steps": str(task.settings.stages.sample_steps),
        "data": f"{pairs.photos} photos, {pairs.pixels / 1e6:.1f} megapixels",
        "steps": str(outcome.position.step),
        "seconds": f"{outcome.position.elapsed_s:.0f}",
        "stage": task.stage,
        "scores": json.dumps({name: asdict(seen) for name, seen in named.items()}),
    }
    save_lsd(model, out / WEIGHTS, dtype, about)
    size = (out / WEIGHTS).stat().st_size
    parameters = sum(weight.numel() for weight in model.parameters())
    result = LsdResult(out / WEIGHTS, out / CARD, size, parameters, task.stage, named)
    write_text(out / CARD, _card(task, outcome, model, result))
    return result


def rounded(model: nn.Module, dtype: torch.dtype) -> Lsd:
    """Returns a copy of the student with its weights converted to `dtype`, as the file stores them."""
    student = model.student if isinstance(model, StudentTeacher) else model
    if not isinstance(student, Lsd):
        raise RedlineError(f"a {type(student).__name__} is not an LSD.")
    return as_stored(student, dtype).eval()


def _card(task: LsdTask, outcome: Outcome, model: Lsd, result: LsdResult) -> str:
    settings, pairs, position = task.settings, task.pairs, outcome.position
    data, stages, loop = settings.data, settings.stages, settings.loop
    reached = STAGES[: STAGES.index(result.stage) + 1]
    lines = [
        f"# {model.config}",
        "",
        "A model that restores live video of a poor camera (noise, blur, compression artefacts, darkness, colour "
        "casts), trained by `redline train lsd`.",
        "",
        "## Model",
        "",
        f"A U-Net of widths {', '.join(str(width) for width in model.config.widths)} over patches of "
        f"{model.config.patch} × {model.config.patch} pixels: {result.parameters:,} parameters, "
        f"{format_bytes(result.model_bytes)} as {settings.model.weights} safetensors. It sees the frame, its own last "
        f"output and noise, and predicts the clean image; it was scored with {stages.sample_steps} steps a frame of "
        "the distilled sampler. The first two entries of its control vector say how much darkness and colour cast to "
        "keep, from 0 to 1.",
        "",
        "## Data",
        "",
        f"{pairs.photos} photos of the folder `{Path(data.photos).resolve().name}`, {pairs.pixels / 1e6:.1f} "
        f"megapixels. Clips of {data.frame_px} × {data.frame_px} are made on the fly by moving a virtual camera over "
        "them, so that every motion is known, and are then degraded. No photo is in the test sets below.",
        "",
        "## Training",
        "",
        f"{position.step:,} steps of {data.batch} clips in {format_seconds(position.elapsed_s)} on "
        f"{device_name(task.device)}, {task.precision}, torch {torch.__version__}. Stages: {', '.join(reached)}. "
        f"{loop.optimizer}, cosine schedule, averaged weights (decay {loop.ema_decay:g}). Peak memory "
        f"{format_bytes(outcome.peak_bytes)}.",
        "",
        *_scores(result),
        "## Limits",
        "",
        "The training motions are those of a camera over a flat scene with one moving object. The model does not "
        "invent detail that the input lacks, and was not tested on people and faces in particular.",
        "",
        *licence_section(data.photos),
        "## Settings",
        "",
        "```json",
        json.dumps(settings.to_dict(), indent=2),
        "```",
    ]
    return "\n".join(lines) + "\n"


def _scores(result: LsdResult) -> list[str]:
    if not result.scores:
        return ["## Scores", "", "No test set was given, so nothing was scored.", ""]
    rows = [
        f"| {name} | {seen.clips} × {seen.frames} | **{seen.psnr_db:.2f}** | {seen.alone_psnr_db:.2f} "
        f"| {seen.input_psnr_db:.2f} | **{seen.warp_error:.5f}** | {seen.alone_warp_error:.5f} "
        f"| {seen.input_warp_error:.5f} | {seen.clean_warp_error:.5f} | {seen.drift_db:+.2f} |"
        for name, seen in result.scores.items()
    ]
    return [
        "## Scores",
        "",
        "PSNR in dB and warp error (mean absolute difference to the frame before, moved by the known motion) of the "
        "weights as stored, in fp32: with its own history, each frame alone, the input itself, and for the warp error "
        "the clean video. Drift is the loss of the gain from the first quarter of the frames to the last.",
        "",
        "| test set | clips × frames | PSNR | alone | input | warp error | alone | input | clean video | drift dB |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        *rows,
        "",
    ]

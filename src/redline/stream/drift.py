"""`evaluate_drift` measures whether a stream's model stays stable over a thousand frames."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from redline.errors import RedlineError
from redline.evaluation.drift import CONTROLS, Case, CaseRun, Finding, judge, photo_cases, run_case, video_case
from redline.evaluation.drift.case_run import LEAST_FRAMES, NewModel, check_frames
from redline.evaluation.drift.page import render_drift_page
from redline.files.atomic import write_text
from redline.ladder.plan import Plan, read_plan
from redline.machine.machine import resolve_device
from redline.stream.frame_model import FrameModel
from redline.stream.loading import load_model
from redline.stream.settings import Settings
from redline.stream.sources.video_file import VideoFile

# Called after each frame with the name of the run, the number of completed frames and the total number.
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class DriftResult:
    """The result of a drift evaluation. `controls` maps each control, a model that must fail, to its findings."""

    model: Path
    clip: Path
    description: str
    plan: Plan
    steps: int
    runs: tuple[CaseRun, ...]
    findings: tuple[Finding, ...]
    controls: Mapping[str, list[Finding]]

    @property
    def is_stable(self) -> bool:
        """Whether the model is within the limits of all findings."""
        return all(finding.holds for finding in self.findings)

    @property
    def controls_that_passed(self) -> list[str]:
        """The controls that stayed within all limits. If any did, the evaluation is meaningless: controls must fail."""
        return [name for name, findings in self.controls.items() if all(finding.holds for finding in findings)]

    def write_page(self, path: Path) -> None:
        """Writes an HTML page with the findings, and the metrics of each frame as curves."""
        about = f"{self.description} · {self.clip.name}"
        write_text(path, render_drift_page(self.model.name, about, self.runs, self.findings, self.controls))

    def write_rows(self, path: Path) -> None:
        """Writes the metrics of each frame as JSON lines."""
        lines = [
            # Leaves out metrics that are NaN: they are unknown for this frame.
            {"case": run.case, "frame": index, **{name: value for name, value in row.items() if value == value}}
            for run in self.runs
            for index, row in enumerate(run.rows)
        ]
        write_text(path, "".join(json.dumps(line) + "\n" for line in lines))


def evaluate_drift(
    model: str | Path,
    clip: str | Path,
    *,
    frames: int = 1000,
    size: int = 256,
    steps: int | None = None,
    sampler: str | None = None,
    strength: float | None = None,
    seed: int = 0,
    plan: Plan | str = "eager",
    device: str = "auto",
    controls: bool = True,
    progress: Progress = lambda name, frame, frames: None,
) -> DriftResult:
    """Measures a live model over many frames: colours, contrast, detail, structure, flicker and response.

    Args:
        model: LSD weights, the output folder of their training, or a diffusers folder.
        clip: a video, or a folder of photos from which three clips with known motion are made.
        frames: the number of frames of each case.
        size: the side of clips made from photos, in pixels.
        steps, sampler, strength: how a frame is sampled; None uses the model's default.
        seed: the same seed makes the same clips and noise.
        plan: a plan of the ladder for the U-Net.
        device: `"auto"`, `"cpu"`, `"cuda"` or `"cuda:1"`.
        controls: also run models that must fail (constant, noise, identity), to show that the evaluation can fail.
        progress: called after each frame with the name of the run, the number of completed frames, and the total.

    >>> result = evaluate_drift("toy.safetensors", "clip.mp4", frames=64, steps=1, device="cpu", controls=False)
    >>> {finding.case for finding in result.findings}, [finding.name for finding in result.findings][:2]
    ({'clip.mp4'}, ['follows its input', 'does something'])
    """
    model, clip = Path(model), Path(clip)
    check_frames(frames)
    if size < 1:
        raise RedlineError(f"size must be at least 1 pixel, not {size}.")
    target = torch.device(resolve_device(device))
    loaded = load_model(model, read_plan(plan), target, sampler)
    frame_model = loaded.frames
    steps, strength = loaded.steps if steps is None else steps, loaded.strength if strength is None else strength
    settings = Settings(strength, steps, seed)
    frame_model.check(settings)

    def cases(count: int) -> list[Case]:
        return _cases(clip, count, size, frame_model, seed)

    def run(name: str, new_model: NewModel, case: Case) -> CaseRun:
        return run_case(new_model, case, lambda frame: progress(name, frame, case.frames))

    runs = tuple(run(case.name, _new_model(frame_model, settings, case), case) for case in cases(frames))
    judged: dict[str, list[Finding]] = {}
    for name, control in CONTROLS.items() if controls else ():
        # Controls run on separate short cases, because the start of a long case would contain no scene cut.
        control_runs = [run(f"{name}, {case.name}", lambda: control, case) for case in cases(LEAST_FRAMES)]  # noqa: B023
        judged[name] = [finding for control_run in control_runs for finding in judge(control_run)]
    counted = f"{settings.steps} step{'s' if settings.steps > 1 else ''}"
    description = f"{frame_model.name} · {sampler or 'default sampler'}, {counted} · plan {frame_model.plan} · {target}"
    findings = tuple(finding for each in runs for finding in judge(each))
    return DriftResult(model, clip, description, frame_model.plan, settings.steps, runs, findings, judged)


def _cases(clip: Path, frames: int, size: int, model: FrameModel, seed: int) -> list[Case]:
    if clip.is_dir():
        return photo_cases(str(clip), frames, model.padded_px(size), model.device, seed)
    with closing(VideoFile(clip)) as video:
        # Crops the frames to a size that the model accepts without padding.
        height, width = (_supported_side(side, model) for side in (video.height, video.width))

    def images() -> Iterator[Tensor]:
        with closing(VideoFile(clip)) as source:
            for frame in islice(source.frames(), frames):
                yield frame.pixels[:height, :width].to(model.device)

    return [video_case(clip.name, images, frames)]


def _supported_side(side_px: int, model: FrameModel) -> int:
    supported = next((side for side in range(side_px, 0, -1) if model.padded_px(side) == side), None)
    if supported is None:
        raise RedlineError(f"frames with a side of {side_px} pixels are too small for {model.name}.")
    return supported


def _new_model(model: FrameModel, settings: Settings, case: Case) -> NewModel:
    """Returns a factory of models that compute a frame as the engine does, without state besides the previous
    output."""
    height, width = next(case.inputs(0)).frame.shape[-2:]
    program = model.program(settings.steps, height, width)
    program.retune(settings)

    def run(frame: Tensor, previous: Tensor) -> Tensor:
        return (program.run(frame * 2 - 1, previous * 2 - 1).clamp(-1, 1) + 1) / 2

    return lambda: run

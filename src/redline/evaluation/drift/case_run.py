"""Runs a model on a case, feeding its output back as a stream does, and measures every frame.

The last frames are processed a second time by new models that start only a few frames earlier. The input is the same,
so any difference between the outputs of the long run and of the new models is drift.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from redline.errors import RedlineError
from redline.evaluation.drift.cases import Case, CaseFrame, Model
from redline.evaluation.drift.metrics import NAMES, frame_metrics

# To measure the response, the input is changed by at most this much, in a pattern that is interpolated from a grid of
# this many cells per side. The grid is so coarse that no restoration removes the pattern.
_PROBE = 0.1
_PROBE_CELLS = 4
_PROBES = 20
# A shorter run has too few frames to compare its start and end, or to settle after a cut.
LEAST_FRAMES = 64
# The output may take this many frames to settle after the start and after a cut.
SETTLING = 8

Row = dict[str, float]
NewModel = Callable[[], Model]  # returns a new model, which has no previous output


@dataclass(frozen=True)
class CaseRun:
    """One row of metrics per frame; NaN if a metric is unknown.

    The last frames are processed again by models that start 8 to 15 frames before each of them (`restarted`), and every
    eighth of them by a model without a previous frame (`alone`).
    """

    case: str
    cut: int | None
    rows: tuple[Row, ...]
    restarted: tuple[Row, ...] = ()
    alone: Mapping[int, Row] = field(default_factory=dict)

    def series(self, name: str) -> list[float]:
        return [row[name] for row in self.rows]

    @property
    def first(self) -> range:
        """The first tenth of the frames after settling; if there is a cut, the first tenth of the new scene."""
        begin = min(SETTLING + (self.cut or 0), len(self.rows) - 2)
        return range(begin, begin + max(1, (len(self.rows) - begin) // 10))

    @property
    def last(self) -> range:
        return range(len(self.rows) - len(self.first), len(self.rows))


@torch.inference_mode()
def run_case(new_model: NewModel, case: Case, progress: Callable[[int], None] = lambda frame: None) -> CaseRun:
    """Runs a model on all frames. On some frames, a second forward pass with a changed input measures the response."""
    collected: list[Tensor] = []
    # At least one frame in 16 is probed, because a video may end long before the requested number of frames.
    every = max(1, min(case.frames // _PROBES, LEAST_FRAMES // 4))
    model, before = new_model(), None
    for index, shown in enumerate(case.inputs(0)):
        output, metrics, previous = _step(model, shown, before)
        response = _response(model, shown.frame, previous, output) if index % every == 0 else _nan(output)
        collected.append(torch.cat((metrics, response[None])))
        before = (shown, output)
        progress(index + 1)
    check_frames(len(collected))
    run = CaseRun(case.name, case.cut, _rows(collected))
    restarted, alone = list[Tensor](), dict[int, Tensor]()
    for index, age, metrics in _restart(new_model, case, run.last):
        if age >= SETTLING:
            restarted.append(metrics)
        elif age == 0:
            alone[index] = metrics
    return replace(run, restarted=_rows(restarted), alone=dict(zip(alone, _rows(list(alone.values())), strict=True)))


def check_frames(count: int) -> None:
    if count < LEAST_FRAMES:
        raise RedlineError(f"a drift evaluation needs at least {LEAST_FRAMES} frames, not {count}.")


def _step(model: Model, shown: CaseFrame, before: tuple[CaseFrame, Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the output for a frame, its metrics, and the previous output that was used."""
    previous = shown.frame if before is None else before[1]
    output = model(shown.frame, previous).clamp(0, 1)
    if output.shape != shown.frame.shape:
        raise RedlineError(
            f"the model returned shape {tuple(output.shape)} for a frame of shape {tuple(shown.frame.shape)}."
        )
    return output, frame_metrics(shown, output, before), previous


def _restart(new_model: NewModel, case: Case, last: range) -> Iterator[tuple[int, int, Tensor]]:
    """Starts a new model every 8 frames near the end. Yields frame index, age of the model in frames, and metrics."""
    running: list[tuple[Model, int, tuple[CaseFrame, Tensor] | None]] = []
    first = max(last.start - SETTLING, 0)
    for index, shown in enumerate(case.inputs(first), first):
        if (index + SETTLING - last.start) % SETTLING == 0:
            running = [*running[-1:], (new_model(), index, None)]
        advanced: list[tuple[Model, int, tuple[CaseFrame, Tensor] | None]] = []
        for model, start, before in running:
            output, metrics, _ = _step(model, shown, before)
            advanced.append((model, start, (shown, output)))
            if index in last:
                yield index, index - start, torch.cat((metrics, _nan(output)[None]))
        running = advanced


def _rows(collected: list[Tensor]) -> tuple[Row, ...]:
    table = torch.stack(collected).double().cpu().tolist()
    return tuple(dict(zip(NAMES, row, strict=True)) for row in table)


def _nan(like: Tensor) -> Tensor:
    return like.new_tensor(math.nan)


def _response(model: Model, frame: Tensor, previous: Tensor, output: Tensor) -> Tensor:
    """Returns the change of the output divided by a small change of the frame."""
    generator = torch.Generator(frame.device).manual_seed(0)
    cells = torch.rand(1, 3, _PROBE_CELLS, _PROBE_CELLS, generator=generator, device=frame.device) - 0.5
    pattern = torch.nn.functional.interpolate(cells, size=frame.shape[-2:], mode="bilinear", align_corners=False)
    # Changes go towards the middle of the range, so that they are not clipped.
    changed = frame + 2 * _PROBE * pattern.abs() * (frame < 0.5).float() - 2 * _PROBE * pattern.abs() * (frame >= 0.5)
    return (model(changed, previous).clamp(0, 1) - output).abs().mean() / (changed - frame).abs().mean()

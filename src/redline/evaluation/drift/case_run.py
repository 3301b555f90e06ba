"""Runs a model through a case, feeding its own output back as a stream does, and notes figures of every frame.

The last frames are seen a second time by a model that began only a few frames before. What is in a picture is the same
for both, so that whatever they differ in has come with time.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from redline.errors import RedlineError
from redline.evaluation.drift.cases import Case, CaseFrame
from redline.evaluation.drift.controls import Make
from redline.evaluation.drift.metrics import NAMES, figures

# Of the probe: a pattern coarse enough to survive any restoration, this strong.
_PROBE = 0.1
_PROBE_CELLS = 4
_PROBES = 20
# Below that there is no beginning and no end to compare, and no time to get over a cut.
LEAST_FRAMES = 64
# Frames after the first, and after a cut, that may differ from what follows.
SETTLING = 8

Row = dict[str, float]
NewModel = Callable[[], Make]  # a model that has seen nothing yet


@dataclass(frozen=True)
class CaseRun:
    """A row for each frame, by name; NaN where a figure is not known. `anew` has the last ones by a model that began
    8 to 16 frames before, `alone` some of them by one that saw nothing before."""

    case: str
    cut: int | None
    rows: tuple[Row, ...]
    anew: tuple[Row, ...] = ()
    alone: Mapping[int, Row] = field(default_factory=dict)

    def series(self, name: str) -> list[float]:
        return [row[name] for row in self.rows]

    @property
    def first(self) -> range:
        """The first tenth, or that of the new scene, without what may differ."""
        begin = min(SETTLING + (self.cut or 0), len(self.rows) - 2)
        return range(begin, begin + max(1, (len(self.rows) - begin) // 10))

    @property
    def last(self) -> range:
        return range(len(self.rows) - len(self.first), len(self.rows))


@torch.inference_mode()
def run_case(begin: NewModel, case: Case, tell: Callable[[int], None] = lambda frame: None) -> CaseRun:
    """A model gets every frame with its last output; some frames it gets twice, a little changed the second time."""
    collected: list[Tensor] = []
    # A film may end long before the frames that were asked for.
    every = max(1, min(case.frames // _PROBES, LEAST_FRAMES // 4))
    make, before = begin(), None
    for index, moment in enumerate(case.moments()):
        made, found, previous = _frame(make, moment, before)
        response = _response(make, moment.seen, previous, made) if index % every == 0 else made.new_tensor(math.nan)
        collected.append(torch.cat((found, response[None])))
        before = (moment, made)
        tell(index + 1)
    check_frames(len(collected))
    watched = CaseRun(case.name, case.cut, _rows(collected))
    anew, alone = list[Tensor](), dict[int, Tensor]()
    for index, age, found in _anew(begin, case, watched.last):
        if age >= SETTLING:
            anew.append(found)
        elif age == 0:
            alone[index] = found
    return replace(watched, anew=_rows(anew), alone=dict(zip(alone, _rows(list(alone.values())), strict=True)))


def _frame(make: Make, moment: CaseFrame, before: tuple[CaseFrame, Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
    """What is made of a frame, its figures, and what it was made with."""
    previous = moment.seen if before is None else before[1]
    made = make(moment.seen, previous).clamp(0, 1)
    if made.shape != moment.seen.shape:
        raise RedlineError(f"the output is {tuple(made.shape)}, and the frame {tuple(moment.seen.shape)}.")
    return made, figures(moment, made, before), previous


def _anew(begin: NewModel, case: Case, last: range) -> Iterator[tuple[int, int, Tensor]]:
    """Those frames, how many their model had seen before, and their figures: every 8 frames another model begins."""
    running: list[tuple[Make, int, tuple[CaseFrame, Tensor] | None]] = []
    for index, moment in enumerate(case.moments()):
        if index + SETTLING < last.start:
            continue
        if (index + SETTLING - last.start) % SETTLING == 0:
            running = [*running[-1:], (begin(), index, None)]
        grown = []
        for make, began, before in running:
            made, found, _ = _frame(make, moment, before)
            grown.append((make, began, (moment, made)))
            if index in last:
                yield index, index - began, torch.cat((found, made.new_tensor([math.nan])))
        running = grown


def _rows(collected: list[Tensor]) -> tuple[Row, ...]:
    table = torch.stack(collected).double().cpu().tolist()
    return tuple(dict(zip(NAMES, row, strict=True)) for row in table)


def check_frames(count: int) -> None:
    if count < LEAST_FRAMES:
        raise RedlineError(f"drift needs {LEAST_FRAMES} frames or more to be seen, not {count}.")


def _response(make: Make, frame: Tensor, previous: Tensor, made: Tensor) -> Tensor:
    """How much of a change of the frame is left in the output."""
    generator = torch.Generator(frame.device).manual_seed(0)
    cells = torch.rand(1, 3, _PROBE_CELLS, _PROBE_CELLS, generator=generator, device=frame.device) - 0.5
    pattern = torch.nn.functional.interpolate(cells, size=frame.shape[-2:], mode="bilinear", align_corners=False)
    # Towards the middle, where nothing is cut off.
    changed = frame + 2 * _PROBE * pattern.abs() * (frame < 0.5).float() - 2 * _PROBE * pattern.abs() * (frame >= 0.5)
    return (make(changed, previous).clamp(0, 1) - made).abs().mean() / (changed - frame).abs().mean()

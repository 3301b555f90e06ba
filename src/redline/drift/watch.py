"""Runs a model through a case, feeding its own output back as a stream does, and notes figures of every frame."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from redline.drift.cases import Case, Moment
from redline.drift.controls import Make
from redline.drift.figures import NAMES, figures
from redline.errors import RedlineError

# Of the probe: a pattern coarse enough to survive any restoration, this strong.
_PROBE = 0.1
_PROBE_CELLS = 4
_PROBES = 20
# Below that there is no beginning and no end to compare, and no time to get over a cut.
LEAST_FRAMES = 64


@dataclass(frozen=True)
class Watched:
    """A row for each frame, by name; NaN where a figure is not known."""

    case: str
    cut: int | None
    rows: tuple[dict[str, float], ...]

    def series(self, name: str) -> list[float]:
        return [row[name] for row in self.rows]


@torch.inference_mode()
def watch(make: Make, case: Case, tell: Callable[[int], None] = lambda frame: None) -> Watched:
    """`make` gets every frame with its last output; some frames it gets twice, a little changed the second time."""
    collected: list[Tensor] = []
    before: tuple[Moment, Tensor] | None = None
    # A film may end long before the frames that were asked for.
    every = max(1, min(case.frames // _PROBES, LEAST_FRAMES // 4))
    for index, moment in enumerate(case.moments()):
        previous = moment.seen if before is None else before[1]
        made = make(moment.seen, previous).clamp(0, 1)
        if made.shape != moment.seen.shape:
            raise RedlineError(f"the output is {tuple(made.shape)}, and the frame {tuple(moment.seen.shape)}.")
        response = made.new_tensor(math.nan)
        if index % every == 0:
            response = _response(make, moment.seen, previous, made)
        collected.append(torch.cat((figures(moment, made, before), response[None])))
        before = (moment, made)
        tell(index + 1)
    check_frames(len(collected))
    table = torch.stack(collected).double().cpu().tolist()
    return Watched(case.name, case.cut, tuple(dict(zip(NAMES, row, strict=True)) for row in table))


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

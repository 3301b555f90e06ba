"""What a model is watched on: a moving camera, one that stands still, a hard cut, or anybody's film.

Of clips made from photos the clean picture and every motion are known; of a film nothing is known but its frames.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from redline.datasets.clips import Clips, ClipSettings

CASES = ("moving", "still", "cut")


@dataclass(frozen=True)
class CaseFrame:
    """A frame (1, 3, H, W) in [0, 1]; where it is known, without the camera's faults, and how it came about."""

    seen: Tensor
    clean: Tensor | None = None
    came_from: Tensor | None = None
    known: Tensor | None = None


@dataclass(frozen=True)
class Case:
    """`moments()` begins anew each time; `cut` is the first frame of another scene, where there is one."""

    name: str
    frames: int
    moments: Callable[[], Iterator[CaseFrame]]
    cut: int | None = None


def photo_cases(photos: str, frames: int, side_px: int, device: torch.device, seed: int = 0) -> list[Case]:
    """Clips over the photos of a folder, the same for the same seed."""
    world_px = 2 * side_px
    moving = ClipSettings(photos, frame_px=side_px, world_px=world_px, batch=1, still=0.0, objects=1.0, cuts=0.0)
    still = ClipSettings(photos, frame_px=side_px, world_px=world_px, batch=1, still=1.0, objects=0.0, cuts=0.0)
    moved, stood = (Clips(settings, device, seed) for settings in (moving, still))

    def clip(clips: Clips, step: int, count: int) -> Iterator[CaseFrame]:
        for frame in clips.clip(step, count):
            yield CaseFrame(frame.seen, frame.clean, frame.came_from, frame.known)

    def with_a_cut() -> Iterator[CaseFrame]:
        yield from clip(moved, 1, frames // 2)
        for index, moment in enumerate(clip(moved, 2, frames - frames // 2)):
            # No pixel of the first frame after the cut was anywhere before.
            nowhere = torch.zeros_like(moment.known) if moment.known is not None else None
            yield moment if index else CaseFrame(moment.seen, moment.clean, moment.came_from, nowhere)

    return [
        Case("moving", frames, lambda: clip(moved, 0, frames)),
        Case("still", frames, lambda: clip(stood, 0, frames)),
        Case("cut", frames, with_a_cut, cut=frames // 2),
    ]


def video_case(name: str, pictures: Callable[[], Iterator[Tensor]], frames: int) -> Case:
    """Of pictures uint8 (H, W, 3), begun anew each time."""

    def moments() -> Iterator[CaseFrame]:
        for picture in pictures():
            yield CaseFrame(picture.permute(2, 0, 1)[None].float() / 255)

    return Case(name, frames, moments)

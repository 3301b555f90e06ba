"""The cases of a drift evaluation: a moving camera, a still one, a hard cut, or any video.

For clips made from photos, the clean image and every motion are known; for a video, only its frames are known.

The controls are useless models that must not pass, although each is perfect in one respect: a constant image never
flickers or drifts, noise never freezes, and the identity is never far from its input.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from redline.datasets.clips import Clips, ClipSettings

CASES = ("moving", "still", "cut")
# Maps the frame and the previous output to the new output, all in [0, 1].
Model = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class CaseFrame:
    """One frame of a case. `frame` is the input, (1, 3, H, W) in [0, 1].

    If known, `clean` is the frame without the camera's degradations, `came_from` the position of each pixel in the
    previous frame, and `known` a mask of the pixels for which that position is valid.
    """

    frame: Tensor
    clean: Tensor | None = None
    came_from: Tensor | None = None
    known: Tensor | None = None


@dataclass(frozen=True)
class Case:
    """A clip. `inputs(start)` yields the frames from index `start`; `cut` is the index of the first after a cut."""

    name: str
    frames: int
    inputs: Callable[[int], Iterator[CaseFrame]]
    cut: int | None = None


def photo_cases(photos: str, frames: int, side_px: int, device: torch.device, seed: int = 0) -> list[Case]:
    """Returns the cases of `CASES`, made from the photos of a folder; the same seed gives the same clips."""
    world_px = 2 * side_px
    moving = ClipSettings(photos, frame_px=side_px, world_px=world_px, batch=1, still=0.0, objects=1.0, cuts=0.0)
    still = ClipSettings(photos, frame_px=side_px, world_px=world_px, batch=1, still=1.0, objects=0.0, cuts=0.0)
    moving_clips, still_clips = (Clips(settings, device, seed) for settings in (moving, still))

    def clip(clips: Clips, step: int, count: int, start: int) -> Iterator[CaseFrame]:
        made = clips.clip(step, count)
        for index in range(start, count):  # each frame is computed on access
            frame = made[index]
            yield CaseFrame(frame.seen, frame.clean, frame.came_from, frame.known)

    def with_cut(start: int) -> Iterator[CaseFrame]:
        cut = frames // 2
        if start < cut:
            yield from clip(moving_clips, 1, cut, start)
        first = max(start - cut, 0)
        for index, shown in enumerate(clip(moving_clips, 2, frames - cut, first), first):
            # After the cut, no pixel has a position in the previous frame.
            unknown = torch.zeros_like(shown.known) if shown.known is not None else None
            yield shown if index else CaseFrame(shown.frame, shown.clean, shown.came_from, unknown)

    return [
        Case("moving", frames, lambda start: clip(moving_clips, 0, frames, start)),
        Case("still", frames, lambda start: clip(still_clips, 0, frames, start)),
        Case("cut", frames, with_cut, cut=frames // 2),
    ]


def video_case(name: str, images: Callable[[], Iterator[Tensor]], frames: int) -> Case:
    """Returns a case made of images, uint8 (H, W, 3); each call of `images()` must start at the first image."""

    def inputs(start: int) -> Iterator[CaseFrame]:
        for image in islice(images(), start, None):
            yield CaseFrame(image.permute(2, 0, 1)[None].float() / 255)

    return Case(name, frames, inputs)


def constant(frame: Tensor, previous: Tensor) -> Tensor:
    return torch.full_like(frame, 0.5)


def noise(frame: Tensor, previous: Tensor) -> Tensor:
    return torch.rand_like(frame)


def identity(frame: Tensor, previous: Tensor) -> Tensor:
    return frame


CONTROLS: dict[str, Model] = {"constant": constant, "noise": noise, "identity": identity}

"""A virtual camera's motion over a photo: pans, zooms, rotations and hand shake, all periodic, for clips of any length.

Positions are in pixels from the center of the frame (u) or of the photo (w). The frame's pixel at u shows the photo at
w = scale · R(angle) · u + centre. B: clips, T: frames.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from redline.datasets.clips.settings import ClipSettings
from redline.datasets.device_copy import SampledTensors

# The ranges of the oscillation periods in frames: of zoom and rotation, and of the faster hand shake.
_PERIODS = (40.0, 200.0)
_SHAKE_PERIODS = (6.0, 18.0)
_SHAKE_PX = 0.7


@dataclass(frozen=True)
class Camera(SampledTensors):
    """For each clip and frame: photo pixels per frame pixel, rotation angle, and the frame center's photo position."""

    scale_BT: Tensor
    angle_BT: Tensor
    centre_BT2: Tensor

    @classmethod
    def draw(cls, settings: ClipSettings, clips: int, frames: int, generator: torch.Generator) -> "Camera":
        def some(low: float, high: float, *shape: int) -> Tensor:
            return low + (high - low) * torch.rand(clips, *shape, 1, generator=generator, dtype=torch.float64)

        def swing(period: Tensor) -> Tensor:
            phase = some(0, 2 * math.pi, *period.shape[1:-1])
            return torch.sin(2 * math.pi * torch.arange(frames, dtype=torch.float64) / period + phase)

        moves = (some(0, 1) >= settings.still).double()
        widest = settings.world_px / settings.frame_px
        # One to two photo pixels per frame pixel, or fewer than two if a rotated frame would not fit into the photo.
        scale = some(1.0, max(1.0, min(2.0, 0.8 * widest)))
        zoom = moves * _sometimes(generator, clips) * some(0, settings.zoom)
        turn = moves * _sometimes(generator, clips) * some(0, settings.turn)
        speed = moves[:, None] * some(0, settings.pan_px, 2) * scale[:, None]
        room = (settings.world_px - settings.frame_px * scale).clamp_min(settings.frame_px / 8)[:, None] / 4
        reach = some(0.3, 1.0, 2) * room
        # With this period, the highest speed of the oscillation is `speed`.
        period = 2 * math.pi * reach / speed.clamp_min(1e-3)
        shake = moves[:, None] * some(0, _SHAKE_PX, 2) * scale[:, None] * swing(some(*_SHAKE_PERIODS, 2))
        middle = some(-1.0, 1.0, 2) * room
        pan = torch.where(speed > 0, reach * swing(period), torch.zeros(()).double())
        return cls(
            (scale * torch.exp(zoom * swing(some(*_PERIODS)))).float(),
            (some(-math.pi, math.pi) * (some(0, 1) < 0.5) * 0.1 + turn * swing(some(*_PERIODS))).float(),
            (middle + pan + shake).movedim(1, 2).float(),
        )

    def to_photo(self, frame: int, u_BHW2: Tensor) -> Tensor:
        """Maps frame positions to photo positions."""
        rotated = _rotate(u_BHW2, self.angle_BT[:, frame])
        return self.scale_BT[:, frame, None, None, None] * rotated + self.centre_BT2[:, frame, None, None]

    def from_photo(self, frame: int, w_BHW2: Tensor) -> Tensor:
        """Maps photo positions to frame positions."""
        offset = (w_BHW2 - self.centre_BT2[:, frame, None, None]) / self.scale_BT[:, frame, None, None, None]
        return _rotate(offset, -self.angle_BT[:, frame])


def _rotate(u_BHW2: Tensor, angle_B: Tensor) -> Tensor:
    cos, sin = (table[:, None, None] for table in (angle_B.cos(), angle_B.sin()))
    x, y = u_BHW2.unbind(-1)
    return torch.stack((cos * x - sin * y, sin * x + cos * y), dim=-1)


def _sometimes(generator: torch.Generator, clips: int) -> Tensor:
    return (torch.rand(clips, 1, generator=generator, dtype=torch.float64) < 0.6).double()

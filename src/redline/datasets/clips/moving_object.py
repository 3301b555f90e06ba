"""Something that passes in front of the camera: an ellipse cut out of another photo, at a steady speed, over and over.

Positions are in pixels from the middle of the frame. B: clips, T: frames.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from redline.datasets.clips.settings import ClipSettings
from redline.datasets.device_copy import send


@dataclass(frozen=True)
class MovingObject:
    """For each clip its radii (0 where nobody passes), its place in each frame, and whether it shows at all."""

    radii_B2: Tensor
    place_BT2: Tensor
    present_B: Tensor

    @classmethod
    def draw(cls, settings: ClipSettings, clips: int, frames: int, generator: torch.Generator) -> "MovingObject":
        def some(low: float, high: float, *shape: int) -> Tensor:
            return low + (high - low) * torch.rand(clips, *shape, generator=generator, dtype=torch.float64)

        present = some(0, 1) < settings.objects
        radii = some(0.08, 0.2, 2) * settings.frame_px
        # It comes back on the other side once it has left on one, so that a long clip meets it many times.
        half = settings.frame_px / 2 + radii.amax(1, keepdim=True) + 2
        speed = some(-1.0, 1.0, 2) * max(settings.pan_px, 1.0)
        way = some(-1.0, 1.0, 2)[:, None] * half[:, None] + speed[:, None] * torch.arange(frames)[:, None]
        place = torch.remainder(way + half[:, None], 2 * half[:, None]) - half[:, None]
        return cls(radii.float(), place.float(), present)

    def to(self, device: torch.device) -> "MovingObject":
        return MovingObject(*send([self.radii_B2, self.place_BT2, self.present_B], device))

    def inside_px(self, frame: int, u_BHW2: Tensor) -> Tensor:
        """About how many pixels a place is inside of it; negative outside."""
        away = (u_BHW2 - self.place_BT2[:, frame, None, None]) / self.radii_B2[:, None, None]
        depth = (1 - away.norm(dim=-1)) * self.radii_B2.amin(1)[:, None, None]
        return torch.where(self.present_B[:, None, None], depth, -1e6)

    def before(self, frame: int, u_BHW2: Tensor) -> Tensor:
        """Where what it shows at `u` was in the frame before."""
        return u_BHW2 - (self.place_BT2[:, frame] - self.place_BT2[:, frame - 1])[:, None, None]

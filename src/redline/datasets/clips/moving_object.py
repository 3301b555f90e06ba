"""An object that crosses the frame again and again: an ellipse of another photo that moves at a constant speed.

Positions are in pixels from the center of the frame. B: clips, T: frames.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from redline.datasets.clips.settings import ClipSettings
from redline.datasets.device_copy import SampledTensors


@dataclass(frozen=True)
class MovingObject(SampledTensors):
    """For each clip: the radii of the ellipse, its center in each frame, and whether the clip has an object."""

    radii_B2: Tensor
    center_BT2: Tensor
    present_B: Tensor

    @classmethod
    def draw(cls, settings: ClipSettings, clips: int, frames: int, generator: torch.Generator) -> "MovingObject":
        def some(low: float, high: float, *shape: int) -> Tensor:
            return low + (high - low) * torch.rand(clips, *shape, generator=generator, dtype=torch.float64)

        present = some(0, 1) < settings.objects
        radii = some(0.08, 0.2, 2) * settings.frame_px
        # The object reenters on the opposite side after it has left the frame, so that a long clip shows it many times.
        half = settings.frame_px / 2 + radii.amax(1, keepdim=True) + 2
        speed = some(-1.0, 1.0, 2) * max(settings.pan_px, 1.0)
        path = some(-1.0, 1.0, 2)[:, None] * half[:, None] + speed[:, None] * torch.arange(frames)[:, None]
        center = torch.remainder(path + half[:, None], 2 * half[:, None]) - half[:, None]
        return cls(radii.float(), center.float(), present)

    def inside_px(self, frame: int, u_BHW2: Tensor) -> Tensor:
        """Returns the approximate distance of positions from the object's edge in pixels; negative outside."""
        offset = (u_BHW2 - self.center_BT2[:, frame, None, None]) / self.radii_B2[:, None, None]
        depth = (1 - offset.norm(dim=-1)) * self.radii_B2.amin(1)[:, None, None]
        return torch.where(self.present_B[:, None, None], depth, -1e6)

    def previous_positions(self, frame: int, u_BHW2: Tensor) -> Tensor:
        """Returns the positions in the previous frame of those points of the object that are now at `u_BHW2`."""
        return u_BHW2 - (self.center_BT2[:, frame] - self.center_BT2[:, frame - 1])[:, None, None]

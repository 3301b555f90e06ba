"""A clip without a fault: photos, a camera that moves over them, something that passes by, and perhaps a cut.

Every frame comes with where each of its pixels was in the frame before, from the motions themselves, and with which
pixels that is known for: not what was hidden or out of sight, nor anything after a cut, nor the rim of what passes by.

B: clips, T: frames, H and W: sides of a frame, S: side of a photo.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from redline.datasets.clips.camera import Camera
from redline.datasets.clips.moving_object import MovingObject
from redline.datasets.clips.settings import ClipSettings
from redline.datasets.clips.warp import look_up, positions
from redline.datasets.device_copy import send

# Photos are looked at twice as finely as a frame has pixels, and averaged: no aliasing, no flicker of its own.
_FINER = 2
# Around the rim of what passes by, interpolation mixes two motions.
_RIM_PX = 2.0


@dataclass(frozen=True)
class Scene:
    """`photos` holds two for each clip, (2, B, 3, S, S): the first until the cut, the second after it and passing."""

    settings: ClipSettings
    photos: Tensor
    camera: Camera
    moving_object: MovingObject
    cut_B: Tensor

    @classmethod
    def draw(cls, settings: ClipSettings, photos: Tensor, frames: int, generator: torch.Generator) -> "Scene":
        """The same for the same generator, on any device; `frames` is how long the clip is."""
        clips, device = photos.shape[1], photos.device
        camera = Camera.draw(settings, clips, frames, generator).to(device)
        moving_object = MovingObject.draw(settings, clips, frames, generator).to(device)
        happens = torch.rand(clips, generator=generator) < settings.cuts
        at = torch.randint(1, max(frames, 2), (clips,), generator=generator)
        (cut,) = send([torch.where(happens, at, frames)], device)
        return cls(settings, photos, camera, moving_object, cut)

    def picture(self, frame: int) -> Tensor:
        """The frame itself, (B, 3, H, W) in [0, 1]."""
        u_BHW2 = self._positions(_FINER)
        places = self.camera.to_photo(frame, u_BHW2)
        after_cut = (frame >= self.cut_B)[:, None, None, None]
        photo, other = torch.where(after_cut, self.photos[1], self.photos[0]), self.photos[1]
        scale = self.camera.scale_BT[:, :1, None, None]
        own = (u_BHW2 - self.moving_object.place_BT2[:, frame, None, None]) * scale
        cover = (self.moving_object.inside_px(frame, u_BHW2) + 0.5).clamp(0, 1)[:, None]
        # Looked up from the corner, so that even after a cut it shows something else than what is behind it.
        passing = look_up(other, own + self.settings.world_px / 4, "reflection")
        picture = look_up(photo, places, "reflection")
        return F.avg_pool2d(picture + cover * (passing - picture), _FINER)

    def motion(self, frame: int) -> tuple[Tensor, Tensor]:
        """Where each pixel was in the frame before, (B, H, W, 2), and 1 where that is known, (B, H, W)."""
        u_BHW2 = self._positions()
        if frame == 0:
            return u_BHW2, torch.zeros_like(u_BHW2[..., 0])
        behind = self.camera.from_photo(frame - 1, self.camera.to_photo(frame, u_BHW2))
        passing = self.moving_object.before(frame, u_BHW2)
        inside, was_inside = (
            self.moving_object.inside_px(frame, u_BHW2),
            self.moving_object.inside_px(frame - 1, behind),
        )
        is_passing = inside > _RIM_PX
        is_behind = (inside < -_RIM_PX) & (was_inside < -_RIM_PX)
        came_from = torch.where((inside > 0)[..., None], passing, behind)
        half = (self.settings.frame_px - 1) / 2
        in_sight = (came_from.abs() <= half).all(-1)
        same_shot = (self.cut_B != frame)[:, None, None]
        return came_from, ((is_passing | is_behind) & in_sight & same_shot).to(u_BHW2.dtype)

    def _positions(self, finer: int = 1) -> Tensor:
        side = self.settings.frame_px
        return positions(side, side, self.photos.device, finer).expand(self.photos.shape[1], -1, -1, -1)

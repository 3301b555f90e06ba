"""A clean clip: photos, a camera that moves over them, an optional moving object and an optional cut.

Every frame comes with the exact motion of its pixels from the previous frame and with a mask of the pixels whose motion
is known. The mask excludes pixels that were hidden or outside the frame, the first frame after a cut, and the edge of
the moving object.

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
from redline.datasets.device_copy import copy_to_device

# Photos are sampled at twice the frame's resolution and averaged, to reduce aliasing and flicker.
_OVERSAMPLING = 2
# Interpolation mixes two motions near the moving object's edge, so motion within this distance of it is unknown.
_EDGE_PX = 2.0


@dataclass(frozen=True)
class Scene:
    """A batch of clips with two `photos` each, (2, B, 3, S, S): the second is shown after the cut and in the object."""

    settings: ClipSettings
    photos: Tensor
    camera: Camera
    moving_object: MovingObject
    cut_B: Tensor

    @classmethod
    def draw(cls, settings: ClipSettings, photos: Tensor, frames: int, generator: torch.Generator) -> "Scene":
        """Samples the scene of clips of `frames` frames; the result does not depend on the device."""
        clips, device = photos.shape[1], photos.device
        camera = Camera.draw(settings, clips, frames, generator).to(device)
        moving_object = MovingObject.draw(settings, clips, frames, generator).to(device)
        happens = torch.rand(clips, generator=generator) < settings.cuts
        at = torch.randint(1, max(frames, 2), (clips,), generator=generator)
        cut_B = copy_to_device(torch.where(happens, at, frames), device)
        return cls(settings, photos, camera, moving_object, cut_B)

    def image(self, frame: int) -> Tensor:
        """Returns the frame, (B, 3, H, W) in [0, 1]."""
        u_BHW2 = self._positions(_OVERSAMPLING)
        places = self.camera.to_photo(frame, u_BHW2)
        after_cut = (frame >= self.cut_B)[:, None, None, None]
        photo, other = torch.where(after_cut, self.photos[1], self.photos[0]), self.photos[1]
        scale = self.camera.scale_BT[:, :1, None, None]
        object_positions = (u_BHW2 - self.moving_object.center_BT2[:, frame, None, None]) * scale
        cover = (self.moving_object.inside_px(frame, u_BHW2) + 0.5).clamp(0, 1)[:, None]
        # The object shows the second photo, and after the cut, the background shows it too. The object's positions in
        # the photo are shifted, so that the object differs from that background.
        object_image = look_up(other, object_positions + self.settings.world_px / 4, "reflection")
        background = look_up(photo, places, "reflection")
        return F.avg_pool2d(background + cover * (object_image - background), _OVERSAMPLING)

    def motion(self, frame: int) -> tuple[Tensor, Tensor]:
        """Returns each pixel's position in the previous frame (B, H, W, 2) and a mask of known motion (B, H, W)."""
        u_BHW2 = self._positions()
        if frame == 0:
            return u_BHW2, torch.zeros_like(u_BHW2[..., 0])
        behind = self.camera.from_photo(frame - 1, self.camera.to_photo(frame, u_BHW2))
        on_object = self.moving_object.previous_positions(frame, u_BHW2)
        inside = self.moving_object.inside_px(frame, u_BHW2)
        was_inside = self.moving_object.inside_px(frame - 1, behind)
        is_object = inside > _EDGE_PX
        is_behind = (inside < -_EDGE_PX) & (was_inside < -_EDGE_PX)
        came_from = torch.where((inside > 0)[..., None], on_object, behind)
        half = (self.settings.frame_px - 1) / 2
        in_sight = (came_from.abs() <= half).all(-1)
        same_shot = (self.cut_B != frame)[:, None, None]
        return came_from, ((is_object | is_behind) & in_sight & same_shot).to(u_BHW2.dtype)

    def _positions(self, oversampling: int = 1) -> Tensor:
        side = self.settings.frame_px
        return positions(side, side, self.photos.device, oversampling).expand(self.photos.shape[1], -1, -1, -1)

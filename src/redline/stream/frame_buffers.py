"""The pictures of one size that a stream works on, and what a frame is from its bytes to the bytes of the next.

All of it lies in memory that stays: the frame as it came, the model's own last output, and the new picture. A frame
whose sides the model does not take is mirrored at its edges, down to a single pixel, and the new one is cut.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from redline.stream.frame_model import FrameModel, FrameProgram
from redline.video.padding_index import reflected

# A scene is told from the next by its rough look alone.
_THUMBNAIL_PX = 16


class FrameBuffers:
    """`fresh` says that what came before has nothing to do with the next frame, which is then its own history; `broken`
    counts frames with values that were not finite."""

    def __init__(self, model: FrameModel, height: int, width: int, cut_threshold: float | None = None) -> None:
        self.height, self.width = height, width
        self.padded = (model.padded_px(height), model.padded_px(width))
        self.cut_threshold = cut_threshold
        device = model.device
        self.pixels = torch.zeros(height, width, 3, dtype=torch.uint8, device=device)
        self.made = torch.zeros(height, width, 3, dtype=torch.uint8, device=device)
        self.previous = torch.zeros(1, 3, *self.padded, device=device)
        self.fresh = torch.ones((), dtype=torch.bool, device=device)
        self.broken = torch.zeros((), dtype=torch.long, device=device)
        self.thumbnail = torch.zeros(1, 3, _THUMBNAIL_PX, _THUMBNAIL_PX, device=device)
        self._mirrored = None
        if self.padded != (height, width):
            sides = zip(self.padded, (height, width), strict=True)
            self._mirrored = tuple(reflected(0, padded, side).to(device) for padded, side in sides)

    @property
    def history(self) -> tuple[Tensor, ...]:
        """What one frame leaves for the next."""
        return self.previous, self.fresh, self.thumbnail, self.broken

    def reset(self) -> None:
        self.fresh.fill_(True)

    def draw(self, program: FrameProgram) -> None:
        """A whole frame, without ever asking the device for a value."""
        frame = self._to_picture(self.pixels)
        previous = torch.where(self._is_fresh(frame), frame, self.previous)
        made = program.run(frame, previous).float()
        # One value that is no number would stay in the history for good: the frame stands there instead.
        is_finite = torch.isfinite(made)
        self.broken += ~is_finite.all()
        clean = torch.where(is_finite, made.clamp(-1, 1), frame)
        self.previous.copy_(clean)
        self.fresh.fill_(False)
        shown = clean[0, :, : self.height, : self.width].permute(1, 2, 0)
        # Rounded by adding a half: bytes are what is left below.
        self.made.copy_((shown * 127.5 + 128).to(torch.uint8))

    def _to_picture(self, pixels_HW3: Tensor) -> Tensor:
        if self._mirrored is not None:
            rows, columns = self._mirrored
            pixels_HW3 = pixels_HW3.index_select(0, rows).index_select(1, columns)
        return (pixels_HW3.permute(2, 0, 1)[None].float() * (2 / 255) - 1).contiguous()

    def _is_fresh(self, frame: Tensor) -> Tensor:
        if self.cut_threshold is None:
            return self.fresh
        seen = F.adaptive_avg_pool2d(frame, _THUMBNAIL_PX)
        is_cut = (seen - self.thumbnail).abs().mean() > self.cut_threshold
        self.thumbnail.copy_(seen)
        return self.fresh | is_cut

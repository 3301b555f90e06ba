"""The device buffers of a stream for one frame size, and the computation of one frame from bytes to bytes.

All buffers keep their addresses, so that a captured CUDA graph can use them: the input frame, the model's previous
output and the new image. A side that the model does not support is padded by reflection and cropped afterwards.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from redline.stream.frame_model import FrameModel, FrameProgram
from redline.video.padding_index import reflected

# Scene cuts are detected on thumbnails of this size.
_THUMBNAIL_PX = 16


class FrameBuffers:
    """`is_first` is True if the next frame has no predecessor; the frame itself then replaces the previous output.

    `nonfinite_frames` counts frames in which the model returned values that are not finite.
    """

    def __init__(self, model: FrameModel, height: int, width: int, cut_threshold: float | None = None) -> None:
        self.height, self.width = height, width
        self.padded = (model.padded_px(height), model.padded_px(width))
        self.cut_threshold = cut_threshold
        device = model.device
        self.input = torch.zeros(height, width, 3, dtype=torch.uint8, device=device)
        self.output = torch.zeros(height, width, 3, dtype=torch.uint8, device=device)
        self.previous = torch.zeros(1, 3, *self.padded, device=device)
        self.is_first = torch.ones((), dtype=torch.bool, device=device)
        self.nonfinite_frames = torch.zeros((), dtype=torch.long, device=device)
        self.thumbnail = torch.zeros(1, 3, _THUMBNAIL_PX, _THUMBNAIL_PX, device=device)
        self._padding_index = None
        if self.padded != (height, width):
            sides = zip(self.padded, (height, width), strict=True)
            self._padding_index = tuple(reflected(0, padded, side).to(device) for padded, side in sides)

    @property
    def state(self) -> tuple[Tensor, ...]:
        """The buffers that carry information from one frame to the next."""
        return self.previous, self.is_first, self.thumbnail, self.nonfinite_frames

    def reset(self) -> None:
        self.is_first.fill_(True)

    def compute(self, program: FrameProgram) -> None:
        """Computes `output` from `input` without synchronizing with the device."""
        frame = self._to_image(self.input)
        previous = torch.where(self._starts_anew(frame), frame, self.previous)
        image = program.run(frame, previous).float()
        # Values that are not finite are replaced by the input, because a single NaN would stay in the state forever.
        is_finite = torch.isfinite(image)
        self.nonfinite_frames += ~is_finite.all()
        clean = torch.where(is_finite, image.clamp(-1, 1), frame)
        self.previous.copy_(clean)
        self.is_first.fill_(False)
        cropped = clean[0, :, : self.height, : self.width].permute(1, 2, 0)
        # 127.5 + 0.5: the conversion to bytes truncates, so adding a half rounds.
        self.output.copy_((cropped * 127.5 + 128).to(torch.uint8))

    def _to_image(self, pixels_HW3: Tensor) -> Tensor:
        if self._padding_index is not None:
            rows, columns = self._padding_index
            pixels_HW3 = pixels_HW3.index_select(0, rows).index_select(1, columns)
        return (pixels_HW3.permute(2, 0, 1)[None].float() * (2 / 255) - 1).contiguous()

    def _starts_anew(self, frame: Tensor) -> Tensor:
        if self.cut_threshold is None:
            return self.is_first
        thumbnail = F.adaptive_avg_pool2d(frame, _THUMBNAIL_PX)
        is_cut = (thumbnail - self.thumbnail).abs().mean() > self.cut_threshold
        self.thumbnail.copy_(thumbnail)
        return self.is_first | is_cut

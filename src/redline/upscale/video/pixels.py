"""Reads the colour tags of decoded frames, and converts frames to float32 RGB tensors and back.

swscale is not used, because its result depends on the processor and on flags, and some flags are wrong for 16-bit RGB.
This code follows the definition in ITU-T H.273, runs on the device of the tensor, and rounds once. Chroma samples are
located as in MPEG: on every other column, and halfway between two rows.

If a video declares no colour matrix, players guess one from its size. Upscaling changes the size, so the matrix is
guessed here from the size of the source, and written into the result.
"""

from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from av.video.format import VideoFormat
from av.video.frame import VideoFrame
from torch import Tensor

from redline.errors import RedlineError

_GBR_TO_RGB, _RGB_TO_GBR = [2, 0, 1], [1, 2, 0]
RGB, BT709, UNSPECIFIED, RESERVED, BT601 = 0, 1, 2, 3, 6
FULL_RANGE = 2
# The weights of red and blue in luma, by the number of the matrix in ITU-T H.273.
_LUMA = {
    BT709: (0.2126, 0.0722),
    4: (0.30, 0.11),
    5: (0.299, 0.114),
    BT601: (0.299, 0.114),
    7: (0.212, 0.087),
    9: (0.2627, 0.0593),
}
_NAMES = {BT709: "BT.709", BT601: "BT.601"}


@dataclass(frozen=True)
class Colour:
    """Matrix, primaries and transfer as numbers of ITU-T H.273, and whether the range is full (black is 0, not 16)."""

    matrix: int
    primaries: int
    transfer: int
    full_range: bool

    @property
    def luma(self) -> tuple[float, float]:
        return _LUMA[self.matrix]

    def as_rgb(self) -> "Colour":
        return replace(self, matrix=RGB, full_range=True)

    def as_yuv(self) -> "Colour":
        """Returns the colours for YUV; RGB, which has no matrix, becomes BT.709, which every player supports."""
        return replace(self, matrix=BT709, full_range=False) if self.matrix == RGB else self

    def tag(self, tagged: Any) -> None:
        """Writes the tags to a frame or a codec context, which have the same attributes."""
        tagged.colorspace, tagged.color_primaries, tagged.color_trc = self.matrix, self.primaries, self.transfer
        tagged.color_range = FULL_RANGE if self.full_range else 1


def to_rgb(frame: VideoFrame, colour: Colour) -> Tensor:
    """Returns the frame as (3, H, W) float32 RGB in [0, 1]."""
    frame = _planar(frame)
    bits, top = frame.format.components[0].bits, (1 << frame.format.components[0].bits) - 1
    planes = [_plane(frame, index) for index in range(min(3, len(frame.planes)))]
    if frame.format.is_rgb:
        return torch.stack([planes[index] for index in _GBR_TO_RGB]).div_(top)
    low, luma_span, chroma_span = _ranges(colour, bits)
    luma = planes[0].sub_(low).div_(luma_span)
    if len(planes) < 3:
        return luma.clamp_(0, 1).expand(3, -1, -1).contiguous()
    height, width = luma.shape
    centred = torch.stack(planes[1:]).sub_(1 << (bits - 1)).div_(chroma_span)
    blue, red = _finer(centred, height, width)
    red_share, blue_share = colour.luma
    red = luma + 2 * (1 - red_share) * red
    blue = luma + 2 * (1 - blue_share) * blue
    green = (luma - red_share * red - blue_share * blue) / (1 - red_share - blue_share)
    return torch.stack([red, green, blue]).clamp_(0, 1)


def to_planes(rgb: Tensor, layout: VideoFormat, colour: Colour) -> list[Tensor]:
    """Returns the integer planes of one frame (3, H, W) in `layout`, on the device of the tensor.

    Planes of more than 8 bits are int16, which is enough because no output has more than 12 bits.
    """
    bits = layout.components[0].bits
    top = (1 << bits) - 1
    rgb = rgb.detach().float().clamp(0, 1)
    if layout.is_rgb:
        whole = _whole(rgb * top, bits)
        return [_bgr0(whole)] if layout.name == "bgr0" else list(whole[_RGB_TO_GBR])
    red_share, blue_share = colour.luma
    low, luma_span, chroma_span = _ranges(colour, bits)
    red, green, blue = rgb
    luma = red_share * red + (1 - red_share - blue_share) * green + blue_share * blue
    chroma = torch.stack([(blue - luma) / (2 * (1 - blue_share)), (red - luma) / (2 * (1 - red_share))])
    chroma = _coarser(chroma, layout.chroma_width(2) == 1, layout.chroma_height(2) == 1)
    chroma = chroma.mul_(chroma_span).add_(1 << (bits - 1)).clamp_(0, top)
    return [_whole(luma.mul_(luma_span).add_(low), bits), *_whole(chroma, bits)]


def to_frame(packed: Tensor, layout: VideoFormat, width: int, height: int, colour: Colour) -> VideoFrame:
    """Returns a frame to encode from its planes, which are concatenated into one tensor on the CPU."""
    frame, rest = VideoFrame(width, height, layout.name), packed.numpy().view(np.uint8)
    pixel_bytes = 4 if layout.name == "bgr0" else packed.element_size()
    for plane in frame.planes:
        rows = np.frombuffer(cast(Any, plane), np.uint8).reshape(plane.height, plane.line_size)
        row_bytes = plane.width * pixel_bytes
        data, rest = np.split(rest, [plane.height * row_bytes])
        rows[:, :row_bytes] = data.reshape(plane.height, row_bytes)
    colour.tag(frame)
    return frame


def _planar(frame: VideoFrame) -> VideoFrame:
    """Returns the frame with one component per plane; swscale repacks other formats without changing colours."""
    layout = frame.format
    bits = max(component.bits for component in layout.components)
    chroma = (layout.chroma_width(4), layout.chroma_height(4))
    one_to_a_plane = len({component.plane for component in layout.components}) == len(layout.components)
    packed = layout.has_palette or layout.is_bit_stream or layout.is_big_endian or not one_to_a_plane
    odd_numbers = bits > 16 or "f16" in layout.name or "msb" in layout.name
    upright = min(plane.line_size for plane in frame.planes) > 0
    if not packed and not odd_numbers and upright and min(chroma) > 1:
        return frame
    depth = "" if bits <= 8 else "10le" if bits <= 10 and not layout.is_rgb else "16le"
    if layout.is_rgb or layout.has_palette:
        return frame.reformat(format=f"gbrp{depth}")
    if len(layout.components) < 3:
        return frame.reformat(format=f"gray{depth}")
    return frame.reformat(format=f"yuv{ {(2, 2): 420, (2, 4): 422}.get(chroma, 444) }p{depth}")


def _plane(frame: VideoFrame, index: int) -> Tensor:
    plane = frame.planes[index]
    dtype = np.uint8 if frame.format.components[0].bits <= 8 else np.uint16
    rows = np.frombuffer(cast(Any, plane), dtype).reshape(plane.height, -1)[:, : plane.width]
    return torch.from_numpy(rows.astype(np.float32))


def _ranges(colour: Colour, bits: int) -> tuple[int, int, int]:
    """Returns the value of black in luma, and the ranges of luma and chroma."""
    step = 1 << (bits - 8)
    return (0, (1 << bits) - 1, (1 << bits) - 1) if colour.full_range else (16 * step, 219 * step, 224 * step)


def _finer(chroma: Tensor, height: int, width: int) -> Tensor:
    """Upsamples chroma (2, h, w) to every pixel."""
    if chroma.shape[1] != height:
        chroma = F.interpolate(chroma[None], scale_factor=(2, 1), mode="bilinear", align_corners=False)[0, :, :height]
    if chroma.shape[2] != width:
        right = torch.cat([chroma[:, :, 1:], chroma[:, :, -1:]], dim=2)
        chroma = torch.stack([chroma, (chroma + right) / 2], dim=3).flatten(2)[:, :, :width]
    return chroma


def _coarser(chroma: Tensor, halve_x: bool, halve_y: bool) -> Tensor:
    """Downsamples chroma (2, H, W); sides that are halved must be even."""
    if halve_y:
        chroma = (chroma[:, 0::2] + chroma[:, 1::2]) / 2
    if halve_x:
        left = torch.cat([chroma[:, :, :1], chroma[:, :, 1:-1:2]], dim=2)
        chroma = (left + 2 * chroma[:, :, 0::2] + chroma[:, :, 1::2]) / 4
    return chroma


def _whole(values: Tensor, bits: int) -> Tensor:
    return values.round_().to(torch.uint8 if bits <= 8 else torch.int16)


def _bgr0(whole: Tensor) -> Tensor:
    """Returns packed pixels of four bytes, (H, W, 4)."""
    return torch.cat([whole.flip(0), torch.zeros_like(whole[:1])]).permute(1, 2, 0)


def colour_of(frame: VideoFrame) -> tuple[Colour, list[str]]:
    """Returns the colours of a decoded frame, and a note if they were guessed."""
    grey = len(frame.format.components) < 3
    full = frame.color_range == FULL_RANGE or frame.format.name.startswith("yuvj")
    # Decoders of grey formats use the full range unless tagged otherwise.
    full = full or (grey and frame.color_range == 0)
    tags = (int(frame.color_primaries), int(frame.color_trc))
    if frame.format.is_rgb or frame.format.has_palette:
        return Colour(RGB, *tags, True), []
    matrix = int(frame.colorspace)
    if matrix in _LUMA:
        return Colour(matrix, *tags, full), []
    if matrix not in (UNSPECIFIED, RESERVED) and not grey:
        raise RedlineError(f"the video's colour matrix (number {matrix} of ITU-T H.273) is not supported.")
    guess = BT709 if frame.width >= 1280 or frame.height >= 720 else BT601
    note = f"the video declares no colour matrix: {_NAMES[guess]} is assumed, as players do for its size, and written"
    return Colour(guess, *tags, full), [] if grey else [note]

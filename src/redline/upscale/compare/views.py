"""Makes views of an image before and after upscaling, of equal size, so that a page can overlay them.

Both sides have the same size and encoding, so that they differ only by the upscaling. The source is resized with a
bicubic filter here, because browsers differ in their filters. Colours become 8-bit sRGB. A large result is downscaled,
which hides most of the difference; then the most detailed region is added at full resolution.

Files are read from the top down in constant memory.
"""

import base64
import math
from collections.abc import Callable, Generator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

import av
import numpy as np
from av.container import InputContainer
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from redline.errors import RedlineError
from redline.upscale.images.decoded_whole import load_whole
from redline.upscale.images.formats import WHOLE
from redline.upscale.images.source import decode, sniffed
from redline.upscale.images.vips import VipsImage, explaining, field, load_vips
from redline.upscale.video.pixels import to_rgb
from redline.upscale.video.probe import VideoInfo, probe
from redline.video.reading import main_stream, opened

# A function that opens the image; called for each pass, because an open file can be read from top to bottom only once.
Opener = Callable[[], VipsImage]

# The size of the region at full resolution; as wide as the page's column.
_CROP_WIDTH_PX, _CROP_HEIGHT_PX = 960, 640
# The largest side of a view; WebP supports up to 16,383 pixels.
_LONGEST_SIDE_PX = 8192
_QUALITIES, _CROP_QUALITIES = (88, 75, 55, 30), (92, 75, 50)
# The fraction of the byte limit for the region at full resolution.
_CROP_SHARE = 1 / 3
# The side of the blocks in which detail is measured, and the width of the border that the bicubic filter needs.
_BLOCK_PX = 16
_CONTEXT_PX = 4
_MOST_DECODED = 600
# How many seconds before the frame to seek to, tried in this order: in some containers, a seek lands after the frame,
# or after the key frame that is needed to decode it.
_SEEK_BACK_S = (0.0, 2.0, 20.0, math.inf)


@dataclass(frozen=True)
class View:
    """Two images of one size as data URIs. `left` … `bottom` bound the shown region, as fractions of the image."""

    before: str
    after: str
    width: int
    height: int
    left: float = 0.0
    top: float = 0.0
    right: float = 1.0
    bottom: float = 1.0


@dataclass(frozen=True)
class Views:
    """The whole image, the most detailed region if the whole is downscaled, and the centre of that region."""

    before_size: tuple[int, int]
    after_size: tuple[int, int]
    has_alpha: bool
    whole: View
    crop: View | None
    focus: tuple[float, float]

    @property
    def is_reduced(self) -> bool:
        return (self.whole.width, self.whole.height) != self.after_size


@dataclass(frozen=True)
class _Region:
    left: int
    top: int
    width: int
    height: int


def open_upright(path: Path) -> VipsImage:
    """Opens an image file as 8-bit sRGB, decoded on demand if its format allows."""
    with explaining(f"cannot read {str(path)!r}"):
        form = sniffed(path)
        is_whole = form.loader == WHOLE
        return _to_srgb(load_whole(path, form) if is_whole else decode(path, form, False, strict=False)[0])


def make_views(before: Opener, after: Opener, pixels: int, data_bytes: int) -> Views:
    """Makes the views: the whole image has at most `pixels` pixels, and the quality is lowered to fit `data_bytes`."""
    source, result = before(), after()
    size, after_size = (source.width, source.height), (result.width, result.height)
    scale = after_size[0] / size[0], after_size[1] / size[1]
    width, height = _fit(*after_size, pixels)
    crop_size = (_CROP_WIDTH_PX / scale[0], _CROP_HEIGHT_PX / scale[1])
    region = most_detailed(
        source, *(max(1, min(side, round(part))) for side, part in zip(size, crop_size, strict=True))
    )
    focus = (region.left + region.width / 2) / size[0], (region.top + region.height / 2) / size[1]
    whole = _encoded(
        _resized(before(), width, height).copy_memory(),
        _resized(result, width, height).copy_memory(),
        _QUALITIES,
        data_bytes * (1 - _CROP_SHARE),
    )
    crop = None
    if (width, height) != after_size:
        crop = _crop(before(), after(), region, scale, data_bytes * _CROP_SHARE)
    return Views(size, after_size, result.hasalpha(), View(*whole, width, height), crop, focus)


def most_detailed(image: VipsImage, width: int, height: int) -> _Region:
    """Returns the region of this size with the largest sum of local standard deviations.

    In a sum of variances, a single hard edge would outweigh a large textured area.
    """
    if image.hasalpha():
        image = image.flatten(background=128)  # the colour of transparent pixels is not visible
    grey = image.colourspace("b-w").cast("float")
    moments = grey.bandjoin(grey * grey).shrink(_BLOCK_PX, _BLOCK_PX, ceil=True).numpy()
    mean, square = moments[..., 0].astype(np.float64), moments[..., 1].astype(np.float64)
    sums = np.sqrt(np.maximum(square - mean * mean, 0)).cumsum(0).cumsum(1)
    sums = np.pad(sums, ((1, 0), (1, 0)))
    rows = min(max(1, height // _BLOCK_PX), len(mean))
    columns = min(max(1, width // _BLOCK_PX), mean.shape[1])
    inside = sums[rows:, columns:] - sums[:-rows, columns:] - sums[rows:, :-columns] + sums[:-rows, :-columns]
    row, column = np.unravel_index(inside.argmax(), inside.shape)
    left = min(int(column) * _BLOCK_PX, image.width - width)
    return _Region(left, min(int(row) * _BLOCK_PX, image.height - height), width, height)


def _crop(source: VipsImage, result: VipsImage, region: _Region, scale: tuple[float, float], data_bytes: float) -> View:
    left, top = round(region.left * scale[0]), round(region.top * scale[1])
    width = min(round(region.width * scale[0]), result.width - left)
    height = min(round(region.height * scale[1]), result.height - top)
    # Includes a border, so that the filter gives the same result at the edge as in the whole image.
    x, y = max(region.left - _CONTEXT_PX, 0), max(region.top - _CONTEXT_PX, 0)
    around = source.crop(
        x,
        y,
        min(region.left + region.width + _CONTEXT_PX, source.width) - x,
        min(region.top + region.height + _CONTEXT_PX, source.height) - y,
    )
    enlarged = _resized(around, round(around.width * scale[0]), round(around.height * scale[1]))
    inset = round((region.left - x) * scale[0]), round((region.top - y) * scale[1])
    pair = _encoded(
        enlarged.crop(*inset, width, height).copy_memory(),
        result.crop(left, top, width, height).copy_memory(),
        _CROP_QUALITIES,
        data_bytes,
    )
    shares = left / result.width, top / result.height, (left + width) / result.width, (top + height) / result.height
    return View(*pair, width, height, *shares)


def _fit(width: int, height: int, pixels: int) -> tuple[int, int]:
    """Returns the size with the same aspect ratio and at most `pixels` pixels."""
    share = min(1.0, math.sqrt(pixels / (width * height)), _LONGEST_SIDE_PX / max(width, height))
    return max(1, math.floor(width * share)), max(1, math.floor(height * share))


def _resized(image: VipsImage, width: int, height: int) -> VipsImage:
    if (image.width, image.height) == (width, height):
        return image
    if image.width * image.height <= width * height:
        image = image.copy_memory()  # resizing reads rows more than once
    visible = image.premultiply() if image.hasalpha() else image
    resized = visible.resize(width / image.width, vscale=height / image.height, kernel="cubic")
    return resized.unpremultiply().rint().cast("uchar") if image.hasalpha() else resized


def _to_srgb(image: VipsImage) -> VipsImage:
    if field(image, "icc-profile-data") is not None:
        with suppress(load_vips().Error):  # browsers also ignore an unreadable profile
            return image.icc_transform("srgb", embedded=True, depth=8, intent="relative", black_point_compensation=True)
    return image.colourspace("srgb")


def _encoded(before: VipsImage, after: VipsImage, qualities: tuple[int, ...], data_bytes: float) -> tuple[str, str]:
    """Encodes both sides at the first quality at which they fit in `data_bytes`, else at the last one."""
    sides: tuple[bytes, ...] = ()
    for quality in qualities:
        sides = tuple(side.webpsave_buffer(Q=quality, effort=2, keep=0) for side in (before, after))
        if sum(map(len, sides)) <= data_bytes:
            break
    before_uri, after_uri = ("data:image/webp;base64," + base64.b64encode(side).decode("ascii") for side in sides)
    return before_uri, after_uri


@dataclass(frozen=True)
class Moment:
    """A frame (H, W, 3) of uint8, its time since the first frame, and its rotation in quarter turns to the left.

    Times are relative because broadcast videos start at an arbitrary time stamp, and their upscaled versions at 0.
    """

    pixels: np.ndarray
    seconds: float
    quarter_turns: int


def middle_of(source: Path, target: Path) -> tuple[np.ndarray, np.ndarray, float]:
    """Returns the middle frame before and after, upright, as (H, W, 3) of uint8, and its time in seconds.

    Both are found by seeking, so a long video takes no longer than a short one. If key frames are so rare that too many
    frames would have to be decoded, an earlier frame is used.
    """
    video, enlarged = probe(source), probe(target)
    half_frame_s = float(0.5 / video.rate)
    before = _frame_at(video, float((video.frames or 0) / video.rate / 2), half_frame_s)
    after = _frame_at(enlarged, before.seconds, half_frame_s)
    if abs(after.seconds - before.seconds) > half_frame_s:
        raise RedlineError(f"cannot find the frame at {before.seconds:.2f} s of {source.name!r} in {target.name!r}.")
    # The encoder may have added a column or row for subsampled chroma.
    scale = round(enlarged.width / video.width)
    pixels = after.pixels[: scale * video.height, : scale * video.width]
    return np.rot90(before.pixels, before.quarter_turns), np.rot90(pixels, before.quarter_turns), before.seconds


def _frame_at(video: VideoInfo, seconds: float, half_frame_s: float) -> Moment:
    """Returns the frame at `seconds`, or the nearest frame that can be decoded."""
    nearest: Moment | None = None
    for back_s in _SEEK_BACK_S:
        found = _sought(video, max(0.0, seconds - back_s), seconds - half_frame_s)
        if found is not None and (nearest is None or abs(found.seconds - seconds) < abs(nearest.seconds - seconds)):
            nearest = found
        if nearest is not None and abs(nearest.seconds - seconds) <= half_frame_s:
            break
    if nearest is None:
        raise RedlineError(f"cannot read a frame near {seconds:.2f} s of {video.path.name!r}.")
    return nearest


def _sought(video: VideoInfo, place_s: float, seconds: float) -> Moment | None:
    """Seeks to `place_s` and returns the first frame at or after `seconds`, or the last one before."""
    found: tuple[VideoFrame, int] | None = None
    with opened(video.path) as container:
        stream = main_stream(container, video.path)
        start = stream.start_time or 0
        try:
            if place_s > 0:
                container.seek(start + round(place_s / video.time_base), stream=stream)
            with closing(_decoded(container, stream)) as frames:
                for found in frames:
                    if (found[1] - start) * video.time_base >= seconds:
                        break
        except (av.FFmpegError, OSError):
            return None
    if found is None:
        return None
    frame, pts = found
    pixels = to_rgb(frame, video.colour).mul(255).round().byte().permute(1, 2, 0).numpy()
    return Moment(pixels, float((pts - start) * video.time_base), round((frame.rotation or 0) / 90))


def _decoded(container: InputContainer, stream: VideoStream) -> Generator[tuple[VideoFrame, int], None, None]:
    """Yields each complete frame that has a time stamp, together with its time stamp."""
    for number, frame in enumerate(container.decode(stream)):
        if number >= _MOST_DECODED:
            return
        if isinstance(frame, VideoFrame) and frame.pts is not None and not frame.is_corrupt:
            yield frame, frame.pts

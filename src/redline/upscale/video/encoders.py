"""Chooses the encoder, its pixel format and its options."""

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from av.codec import Codec
from av.video.format import VideoFormat

from redline.errors import RedlineError
from redline.machine.cpu_features import hardware_flags
from redline.upscale.video.pixels import RGB, Colour
from redline.upscale.video.probe import VideoInfo
from redline.upscale.video.settings import TARGETS, VideoSettings, target_format


@dataclass(frozen=True)
class _Kind:
    """An encoder: its default crf (None if it has no crf), the crf of the lowest quality, and its other options."""

    name: str
    crf: float | None = None
    worst_crf: float = 0
    options: tuple[tuple[str, str], ...] = ()


_KINDS = {
    "h264": _Kind("libx264", 17, 51, (("preset", "medium"),)),
    "hevc": _Kind("libx265", 19, 51, (("preset", "medium"), ("x265-params", "log-level=none"))),
    "av1": _Kind("libsvtav1", 24, 63, (("preset", "8"),)),
    "vp9": _Kind("libvpx-vp9", 24, 63, (("cpu-used", "3"), ("b", "0"), ("row-mt", "1"))),
    # Every frame is a key frame, because lossless video is made for editing.
    "ffv1": _Kind("ffv1", options=(("level", "3"), ("slicecrc", "1"), ("g", "1"))),
    "prores": _Kind("prores_ks"),
    "mpeg4": _Kind("mpeg4", options=(("flags", "+qscale"), ("global_quality", "236"))),
}
# The codecs that players expect in each container; some muxers would accept more.
_HELD = {
    "mp4": ("h264", "hevc", "av1", "vp9", "mpeg4"),
    "mov": ("h264", "hevc", "prores", "mpeg4"),
    "matroska": tuple(_KINDS),
    "webm": ("av1", "vp9"),
}
_MOST_BITS = 12


@dataclass(frozen=True)
class Encoder:
    """An encoder. `padded` columns and rows are added at the right and bottom if subsampled chroma needs even sides."""

    codec: str
    name: str
    options: dict[str, str]
    pixel_format: str
    colour: Colour
    width: int
    height: int
    padded: tuple[int, int]

    @property
    def layout(self) -> VideoFormat:
        return VideoFormat(self.pixel_format, self.width, self.height)


def available_codecs() -> list[str]:
    """Returns the values of `VideoSettings.codec` that the installed PyAV can write."""
    return [codec for codec, kind in _KINDS.items() if _exists(kind.name)]


def check_encoding(settings: VideoSettings) -> None:
    """Raises `RedlineError` for an unknown codec or a crf out of range, as far as known without a video."""
    if settings.codec != "auto":
        _codec(settings.codec, "")
        _check_crf(settings.crf, settings.codec)
    elif settings.crf is not None:
        # The codec depends on the container of the video, so only a crf that no codec supports is refused.
        _check_crf(settings.crf, max(_KINDS, key=lambda codec: _KINDS[codec].worst_crf))


def choose_encoder(settings: VideoSettings, video: VideoInfo, target: Path, scale: int) -> tuple[Encoder, list[str]]:
    """Returns the encoder for a video, and notes on what it does not keep."""
    container = target_format(target)
    codec, notes = _codec(settings.codec, container)
    kind = _KINDS[codec]
    if codec not in _HELD[container]:
        fitting = [suffix for suffix, name in TARGETS.items() if codec in _HELD[name] and suffix != ".m4v"]
        raise RedlineError(f"{target.suffix} cannot hold {codec}: choose {' or '.join(fitting)}, or another codec.")
    if kind.name == "libsvtav1":
        # SVT-AV1 prints to stderr unless this environment variable is set.
        os.environ.setdefault("SVT_LOG", "1")
    source = VideoFormat(video.pixel_format)
    pixel_format, more = _pixel_format(codec, kind.name, source)
    layout = VideoFormat(pixel_format)
    width, height = video.width * scale, video.height * scale
    padded = (width % 2 * (layout.chroma_width(2) == 1), height % 2 * (layout.chroma_height(2) == 1))
    if any(padded):
        more.append(
            f"{width}×{height} is odd and {pixel_format} needs even sides: the last row or column is repeated, to "
            f"{width + padded[0]}×{height + padded[1]}"
        )
    if layout.is_rgb:
        colour = video.colour.as_rgb()
    else:
        colour = video.colour.as_yuv()
        if video.colour.matrix == RGB:
            more.append("the video is RGB and is written as YUV with the BT.709 matrix; ffv1 keeps RGB")
    if codec == "h264" and pixel_format != "yuv420p":
        more.append(f"H.264 in {pixel_format}, as in the source, plays on few devices; hevc plays on more")
    options = _options(codec, kind, settings, layout)
    encoder = Encoder(codec, kind.name, options, pixel_format, colour, width + padded[0], height + padded[1], padded)
    return encoder, notes + more


def _codec(asked: str, container: str) -> tuple[str, list[str]]:
    known = available_codecs()
    if asked == "auto":
        wanted = _HELD["webm"] if container == "webm" else ("h264", "mpeg4")
        codec = next((codec for codec in wanted if codec in known), None)
        if codec is None:
            raise RedlineError(f"the installed PyAV has no encoder for {container}: it needs {' or '.join(wanted)}.")
        missing = f"the installed PyAV has no encoder for {wanted[0]}"
        return codec, [] if codec == wanted[0] else [f"{missing}: {codec} is used, which looks worse at the same size"]
    if asked not in known:
        raise RedlineError(f"unknown codec {asked!r}: choose {', '.join(known)}.")
    return asked, []


def _check_crf(crf: float | None, codec: str) -> None:
    kind = _KINDS[codec]
    if crf is None:
        return
    if kind.crf is None:
        raise RedlineError(f"{codec} has no crf: leave out --crf.")
    if not 0 <= crf <= kind.worst_crf:
        raise RedlineError(f"crf must be between 0 and {kind.worst_crf:g} for {codec}, not {crf:g}.")


def _options(codec: str, kind: _Kind, settings: VideoSettings, layout: VideoFormat) -> dict[str, str]:
    options = dict(kind.options)
    if codec == "h264" and "avx512f" in hardware_flags():
        # x264's AVX-512 code is not deterministic at some widths, and a resumed run must give the same video.
        options["x264-params"] = "asm=avx2"
    _check_crf(settings.crf, codec)
    if kind.crf is not None:
        options["crf"] = f"{kind.crf if settings.crf is None else settings.crf:g}"
    if codec == "prores":
        options["profile"] = "4444" if layout.chroma_width(2) == 2 else "hq"
    return options


def _pixel_format(codec: str, name: str, source: VideoFormat) -> tuple[str, list[str]]:
    """Returns the pixel format that is nearest to the source, and a note if it has fewer bits.

    Chroma resolution is compared first, then bits; in both, a format with more than the source is preferred to one with
    less.
    """
    bits = max(component.bits for component in source.components)
    if codec == "ffv1":
        kept = next((depth for depth in (8, 10, 12) if depth >= bits), _MOST_BITS)
        chosen = "bgr0" if kept == 8 else f"gbrp{kept}le"
    else:
        if source.is_rgb or source.has_palette:
            # H.264 uses 4:2:0, because it is the only chroma format that all players support. At a scale of 2 or more,
            # the upscaled video still has at least as many chroma samples as its source.
            wanted = 420 if codec == "h264" else 444
        elif len(source.components) < 3 or source.chroma_height(2) == 1:
            wanted = 420
        else:
            wanted = 422 if source.chroma_width(2) == 1 else 444
        names = (layout.name for layout in Codec(name, "w").video_formats or [])
        matches = filter(None, (re.fullmatch(r"yuv(420|422|444)p(?:(10|12)le)?", name) for name in names))
        offered = [(int(match[1]), int(match[2] or 8), match[0]) for match in matches]
        _, kept, chosen = min(
            offered, key=lambda it: (it[0] < wanted, abs(it[0] - wanted), it[1] < bits, abs(it[1] - bits))
        )
    return chosen, [f"the video has {bits} bits per colour and {codec} keeps {kept}"] if kept < bits else []


def _exists(name: str) -> bool:
    with suppress(ValueError):
        return Codec(name, "w").is_encoder
    return False

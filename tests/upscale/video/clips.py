"""Tiny videos that tests make for themselves: a moving pattern, sound, subtitles, chapters, odd clocks."""

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from functools import wraps
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from torch import Tensor

from redline.upscale.video.frames import Damage, read_frames
from redline.upscale.video.pixels import to_rgb
from redline.upscale.video.probe import probe
from redline.upscale.video.run import upscale_video
from redline.upscale.video.settings import VideoProgress, VideoResult, VideoSettings

MILLISECONDS = Fraction(1, 1000)
CHAPTERS = [
    {"id": 1, "start": 0, "end": 500, "time_base": MILLISECONDS, "metadata": {"title": "one"}},
    {"id": 2, "start": 500, "end": 1200, "time_base": MILLISECONDS, "metadata": {"title": "two"}},
]
_ASS_HEADER = b"""[Script Info]
ScriptType: v4.00+
[V4+ Styles]
Format: Name, Fontname, Fontsize, PrimaryColour, SecondaryColour, OutlineColour, BackColour, Bold, Italic, Underline
Style: Default,Arial,16,&Hffffff,&Hffffff,&H0,&H0,0,0,0
[Events]
Format: Layer, Start, End, Style, Name, MarginL, MarginR, MarginV, Effect, Text
"""
FAST = {"preset": "ultrafast", "crf": "12", "bf": "2"}


def pattern(number: int, width: int = 48, height: int = 32) -> np.ndarray:
    """Smooth colours that move, brighter in the top left corner, as (H, W, 3) bytes."""
    y, x = np.mgrid[0:height, 0:width]
    waves = [np.sin(x / 9 + number / 5), np.cos(y / 7 - number / 6), np.sin((x + y) / 11 + number / 4)]
    frame = np.stack(waves, axis=-1) * 60 + 120
    frame[: height // 3, : width // 3] += 60
    return frame.round().clip(0, 255).astype(np.uint8)


def made_once(make: Callable[..., list[Fraction]]) -> Callable[..., list[Fraction]]:
    """Encodes the same clip only once in a process."""
    known: dict[object, tuple[bytes, list[Fraction]]] = {}

    @wraps(make)
    def copied(path: Path, **film: Any) -> list[Fraction]:
        about = sorted((name, repr(value)) for name, value in film.items() if name != "draw")
        clip = (path.suffix, film.get("draw"), *about)
        if clip in known:
            path.write_bytes(known[clip][0])
        else:
            times = make(path, **film)
            known[clip] = path.read_bytes(), times
        return list(known[clip][1])

    return copied


@made_once
def make_clip(
    path: Path,
    *,
    frames: int = 20,
    size: tuple[int, int] = (48, 32),
    codec: str = "libx264",
    pixel_format: str = "yuv420p",
    options: dict[str, str] | None = None,
    time_base: Fraction = Fraction(1, 12800),
    rate: Fraction = Fraction(25),
    pts: Sequence[int] | None = None,
    colour: tuple[int, int, int, int] = (1, 1, 1, 1),
    pixel_aspect: Fraction | None = None,
    rotation: float | None = None,
    sound: str | None = None,
    subtitles: str | None = None,
    chapters: bool = False,
    attachment: bool = False,
    muxer: dict[str, str] | None = None,
    draw: Callable[[int, int, int], np.ndarray] = pattern,
) -> list[Fraction]:
    """Writes a video and gives the times at which its frames are shown."""
    times = list(pts) if pts is not None else [round(i / rate / time_base) for i in range(frames)]
    with av.open(str(path), "w", options=muxer or {}) as container:
        container.metadata["title"] = "A video"
        made: Any = container.add_stream(codec, rate=rate, options=options or (FAST if codec == "libx264" else {}))
        made.width, made.height, made.pix_fmt = *size, pixel_format
        made.codec_context.time_base = time_base
        names = ("colorspace", "color_primaries", "color_trc", "color_range")
        for name, value in zip(names, colour, strict=True):
            setattr(made.codec_context, name, value)
        made.metadata["language"] = "fra"
        if pixel_aspect:
            made.codec_context.sample_aspect_ratio = pixel_aspect
        if rotation is not None:
            made.set_display_rotation(rotation)
        seconds = float(times[-1] * time_base) + 1 / float(rate)
        extra = [_add_sound(container, sound, seconds)] if sound else []
        extra += [_add_subtitles(container, subtitles)] if subtitles else []
        if chapters:
            container.set_chapters(CHAPTERS)
        if attachment:
            container.add_attachment("font.ttf", "font/ttf", b"not really a font")
        for number, time in enumerate(times):
            frame = av.VideoFrame.from_ndarray(draw(number, *size), format="rgb24")
            frame = frame.reformat(format=pixel_format, dst_colorspace=1, src_color_range=2, dst_color_range=colour[3])
            frame.pts, frame.time_base = time, time_base
            container.mux(made.encode(frame))
        container.mux(made.encode(None))
        for finish in extra:
            finish()
    return [time * time_base for time in times]


def _add_sound(container: Any, codec: str, seconds: float) -> Callable[[], None]:
    stream = container.add_stream(codec, rate=48000, layout="stereo")
    stream.metadata["language"] = "eng"
    stream.metadata["title"] = "Commentary"
    wave = np.sin(np.arange(int(seconds * 48000)) * 2 * np.pi * 440 / 48000).astype(np.float32) * 0.3

    def finish() -> None:
        for start in range(0, len(wave), 1024):
            piece = np.stack([wave[start : start + 1024]] * 2)
            frame = av.AudioFrame.from_ndarray(piece, format="fltp", layout="stereo")
            frame.sample_rate, frame.pts, frame.time_base = 48000, start, Fraction(1, 48000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))

    return finish


def _add_subtitles(container: Any, codec: str) -> Callable[[], None]:
    stream = container.add_stream(codec)
    stream.metadata["language"] = "ita"
    stream.codec_context.subtitle_header = _ASS_HEADER

    def finish() -> None:
        for number, (start, text) in enumerate([(100, "Ciao"), (500, "mondo")]):
            shown = av.subtitles.subtitle.SubtitleSet.create(f"{number},0,Default,,0,0,0,,{text}".encode(), 0, 300)
            packet = stream.codec_context.encode_subtitle(shown)
            packet.pts = packet.dts = start
            packet.duration, packet.time_base, packet.stream = 300, MILLISECONDS, stream
            container.mux(packet)

    return finish


def doubled(batch: Tensor) -> Tensor:
    """Every pixel twice in both directions: what goes in can be found again."""
    return repeated(2)(batch)


def repeated(scale: int) -> Callable[[Tensor], Tensor]:
    return lambda batch: batch.repeat_interleave(scale, 2).repeat_interleave(scale, 3)


def finishing(enlarge: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Callable[[Tensor], Any]], Any]:
    """As `upscale_video` calls it: with what is done with the enlarged frames."""
    return lambda frames, finish: finish(enlarge(frames))


def upscale(
    source: Path,
    target: Path,
    *,
    enlarge: Callable[[Tensor], Tensor] = doubled,
    scale: int = 2,
    told: list[VideoProgress] | None = None,
    **settings: Any,
) -> VideoResult:
    told = [] if told is None else told
    result = upscale_video(source, target, finishing(enlarge), scale, VideoSettings(**settings), told.append)
    assert told[-1].frames_done == result.frames
    return result


def open_frames(path: Path) -> Iterator[tuple[Tensor, Fraction]]:
    """All frames as Redline reads them, (3, H, W) in [0, 1], with their times."""
    video = probe(path)
    for decoded in read_frames(video, Damage(path.name, keep_going=False)):
        yield to_rgb(decoded.frame, video.colour), decoded.pts * video.time_base


def shown(path: Path) -> list[tuple[Fraction, np.ndarray]]:
    """Times and raw bytes of all frames, as a decoder gives them."""
    with av.open(str(path)) as container:
        base = container.streams.video[0].time_base
        frames = [(frame.pts * base, frame) for frame in container.decode(video=0)]
    # PyAV gives no array of this format; swscale only drops its fourth byte.
    return [(at, (f.reformat(format="rgb24") if f.format.name == "bgr0" else f).to_ndarray()) for at, f in frames]


def times(path: Path) -> list[Fraction]:
    return [time for time, _ in shown(path)]


def rgb(path: Path) -> Tensor:
    """All frames as a player would show them, by swscale, (N, H, W, 3) in [0, 1]."""
    with av.open(str(path)) as container:
        return torch.stack([shown_by_swscale(frame) for frame in container.decode(video=0)])


def shown_by_swscale(frame: av.VideoFrame) -> Tensor:
    """(H, W, 3) in [0, 1]. By way of 16 bits: to gbrp of 8 it leaves the last columns of halved chroma out on x86."""
    return torch.from_numpy(frame.reformat(format="gbrp16le", dst_color_range=2).to_ndarray() / np.float32(65535))

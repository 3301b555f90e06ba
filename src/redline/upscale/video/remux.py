"""Joins the finished parts with the other streams of the source, without encoding again."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from heapq import merge
from pathlib import Path
from typing import NamedTuple

import av
from av.container import InputContainer, OutputContainer
from av.packet import Packet
from av.stream import Discard
from av.video.stream import VideoStream

from redline.errors import RedlineError
from redline.upscale.video.encoders import Encoder
from redline.upscale.video.parts import Part, PartsFolder, why_not_written
from redline.upscale.video.probe import VideoInfo
from redline.upscale.video.settings import target_format
from redline.upscale.video.streams import Carrier, carry_streams, container_tags, copy_tags, stream_tags
from redline.video.reading import arbitrary_start_s, main_stream, opened
from redline.video.writing import exact_clock, open_output

# PyAV cannot write the pixel aspect ratio to the header of a Matroska file. These codecs store it in the stream.
_SHAPE_INSIDE = ("h264", "hevc", "mpeg4")


@dataclass(frozen=True)
class Assembly:
    """Everything that the finished video is assembled from."""

    video: VideoInfo
    encoder: Encoder
    scale: int
    folder: PartsFolder
    parts: list[Part]
    strip: bool


def assemble(assembly: Assembly, target: Path) -> list[str]:
    """Writes the video beside its parts and renames it to the target; returns notes on what was not kept."""
    path, container = assembly.video.path, target_format(target)
    whole = assembly.folder.path / f"whole{target.suffix}"
    try:
        with opened(path) as source, open_output(whole, container, _clock(assembly.video, source)) as output:
            notes = _write(assembly, source, output, container)
        notes += _lost_tags(path, whole, assembly.strip)
        os.replace(whole, target)
    except (OSError, av.FFmpegError) as error:
        raise RedlineError(why_not_written(target, error)) from error
    finally:
        whole.unlink(missing_ok=True)
    return notes


def _write(assembly: Assembly, source: InputContainer, output: OutputContainer, container: str) -> list[str]:
    video = assembly.video
    shift, notes = _shift(source)
    output.metadata.update(container_tags(source))
    stream = _add_video(assembly, source, output, container)
    carriers, more = carry_streams(source, output, container, video.stream_index)
    notes += more
    if container in ("matroska", "webm"):
        notes += _not_in_matroska(assembly)
    output.set_chapters(_chapters(source, shift))
    if assembly.strip:
        _strip(output)
    output.start_encoding()
    source.streams[video.stream_index].discard = Discard.all
    frames = video_packets(video, assembly.folder, assembly.parts, stream, shift)
    for timed in merge(frames, other_packets(source, carriers, shift, notes)):
        output.mux(timed.packet)
    return notes


def _add_video(assembly: Assembly, source: InputContainer, output: OutputContainer, container: str) -> VideoStream:
    video, encoder = assembly.video, assembly.encoder
    with opened(assembly.folder.video_path(0)) as part:
        stream = output.add_stream_from_template(part.streams.video[0], opaque=True)
    stream.time_base = video.time_base
    context = stream.codec_context
    context.framerate = video.rate
    if video.pixel_aspect:
        context.sample_aspect_ratio = video.pixel_aspect
    if encoder.codec == "hevc" and container in ("mp4", "mov"):
        # Apple's players accept HEVC only with this tag.
        context.codec_tag = "hvc1"
    if video.matrix:
        # Entries 6 and 7 are a translation in pixels, so they scale with the frame.
        stream.set_display_matrix([v * assembly.scale if at in (6, 7) else v for at, v in enumerate(video.matrix)])
    copy_tags(main_stream(source, video.path), stream)
    return stream


def _strip(output: OutputContainer) -> None:
    """Removes all tags except languages, by which players choose streams, and the names of attachments."""
    output.metadata.clear()
    for stream in output.streams:
        if stream.type != "attachment":
            for name in [name for name in stream.metadata if name.lower() != "language"]:
                del stream.metadata[name]


def _not_in_matroska(assembly: Assembly) -> list[str]:
    video, codec, notes = assembly.video, assembly.encoder.codec, []
    if video.pixel_aspect and codec not in _SHAPE_INSIDE:
        notes.append(f"the pixel aspect ratio {video.pixel_aspect} is lost: {codec} keeps it only in .mp4 and .mov")
    if any(pts * video.time_base * 1000 % 1 for part in assembly.parts for pts in part.pts):
        notes.append("time stamps are rounded to milliseconds, the resolution of Matroska; .mp4 keeps them")
    return notes


def _clock(video: VideoInfo, source: InputContainer) -> int:
    """Returns a time scale that represents the times of video and audio exactly, if one is possible."""
    rates = [stream.rate for stream in source.streams.audio if stream.codec_context is not None and stream.rate]
    return exact_clock([video.time_base.denominator, *rates], otherwise=video.time_base.denominator)


def _shift(source: InputContainer) -> tuple[Fraction, list[str]]:
    # Shifts all times, because the result would otherwise begin with an empty interval.
    start = arbitrary_start_s(source)
    return start, [f"all timestamps are shifted by {float(start):.3f} s so that the video starts at 0"] if start else []


def _chapters(source: InputContainer, shift: Fraction) -> list:
    moved = ((chapter, round(shift / (chapter["time_base"] or 1))) for chapter in source.chapters())
    return [{**one, "start": one["start"] - ticks, "end": one["end"] - ticks} for one, ticks in moved]


def _lost_tags(source_path: Path, whole: Path, strip: bool) -> list[str]:
    """Returns a note on tags of the source that the container did not keep."""
    with opened(source_path) as source, opened(whole) as written:
        kept = {name.lower() for name in written.metadata}
        lost = [name for name in container_tags(source) if name.lower() not in kept and not strip]
        before = {stream_tags(stream).get("language", "und") for stream in source.streams}
        after = {stream.metadata.get("language", "und") for stream in written.streams}
    lost += [f"language {text}" for text in sorted(before - after - {"und"})]
    return [f"{whole.suffix} does not keep these tags: {', '.join(sorted(lost))}"] if lost else []


class Timed(NamedTuple):
    """A packet to write. Video packets sort before others of the same time."""

    seconds: float
    rank: int
    number: int
    packet: Packet


def video_packets(
    video: VideoInfo, folder: PartsFolder, parts: list[Part], stream: VideoStream, shift: Fraction
) -> Iterator[Timed]:
    """Yields the packets of all parts.

    Their decode time stamps (dts) are the sorted display time stamps (pts), moved earlier by the largest `delay` of a
    part, which is a number of frames.
    """
    moved = round(shift / video.time_base)
    times = [pts - moved for part in parts for pts in part.pts]
    times.append(times[-1] + parts[-1].last_duration)
    delay = max(part.delay for part in parts)
    written = 0
    extradata: bytes | None = None
    for number, part in enumerate(parts):
        with opened(folder.video_path(number)) as container:
            source = container.streams.video[0]
            if number and source.codec_context.extradata != extradata:
                raise RedlineError("the parts do not fit together: start without --resume.")
            extradata = source.codec_context.extradata
            for packet in container.demux(source):
                if packet.pts is None:
                    continue
                shown = part.first + packet.pts
                early = delay - written
                packet.pts, packet.duration = times[shown], times[shown + 1] - times[shown]
                packet.dts = times[written - delay] if early <= 0 else times[0] - early * video.frame_ticks
                packet.time_base, packet.stream = video.time_base, stream
                yield Timed(float(packet.dts * video.time_base), 0, written, packet)
                written += 1


def other_packets(
    source: InputContainer, carriers: dict[int, Carrier], shift: Fraction, notes: list[str]
) -> Iterator[Timed]:
    """Yields the packets of other streams in source order. The output's header must have fixed the time bases."""
    rising = _Rising()
    seconds = float("-inf")
    for number, made in enumerate(_carried(source, carriers, shift, notes)):
        rising.place(made)
        time = made.dts if made.dts is not None else made.pts
        # Keeps the order of the source's packets, even if their times step back.
        seconds = seconds if time is None else max(seconds, float(time * made.time_base))
        yield Timed(seconds, 1, number, made)
    if rising.moved:
        notes.append(f"{rising.moved} audio or subtitle packets had timestamps that did not increase, and were shifted")


def _carried(
    source: InputContainer, carriers: dict[int, Carrier], shift: Fraction, notes: list[str]
) -> Iterator[Packet]:
    if not carriers:
        return
    found = source.demux([source.streams[index] for index in carriers])
    while True:
        try:
            packet = next(found, None)
        except (av.FFmpegError, OSError):
            notes.append("audio and subtitles end where the file can no longer be read")
            packet = None
        if packet is None:
            break
        if packet.size:
            ticks = round(shift / packet.time_base)
            packet.pts = None if packet.pts is None else packet.pts - ticks
            packet.dts = None if packet.dts is None else packet.dts - ticks
            yield from carriers[packet.stream.index](packet)
    for carry in carriers.values():
        yield from carry(None)


class _Rising:
    """Converts packets to the time base of their stream, and makes the dts increase, as muxers require."""

    def __init__(self) -> None:
        self.moved = 0
        self._last: dict[int, int] = {}

    def place(self, packet: Packet) -> None:
        base = Fraction(packet.stream.time_base)
        ratio = Fraction(packet.time_base) / base
        pts = None if packet.pts is None else round(packet.pts * ratio)
        dts = None if packet.dts is None else round(packet.dts * ratio)
        if dts is None and packet.stream.type != "video":
            dts = pts
        last = self._last.get(packet.stream.index)
        if dts is not None and last is not None and dts <= last:
            dts = last + 1
            pts = None if pts is None else max(pts, dts)
            self.moved += 1
        if dts is not None:
            self._last[packet.stream.index] = dts
        packet.pts, packet.dts, packet.duration = pts, dts, round((packet.duration or 0) * ratio)
        packet.time_base = base

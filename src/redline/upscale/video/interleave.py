"""Yields the packets of the finished video in writing order, with their real time stamps."""

from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

import av
from av.container import InputContainer
from av.packet import Packet
from av.video.stream import VideoStream

from redline.errors import RedlineError
from redline.upscale.video.parts import Part, PartsFolder
from redline.upscale.video.probe import VideoInfo
from redline.upscale.video.streams import Carrier
from redline.video.reading import opened


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

    Decode times are the sorted display times, shifted by the largest number of frames the encoder held back.
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
    """Yields audio and subtitles in the source's order. Call it after the output's header has fixed the time bases."""
    rising = _Rising()
    seconds = float("-inf")
    for number, made in enumerate(_carried(source, carriers, shift, notes)):
        rising.place(made)
        time = made.dts if made.dts is not None else made.pts
        # Keeps the order of the source, even if its times step back.
        seconds = seconds if time is None else max(seconds, float(time * made.time_base))
        yield Timed(seconds, 1, number, made)
    if rising.moved:
        notes.append(f"{rising.moved} audio or subtitle packets had times that did not rise, and were moved")


def _carried(
    source: InputContainer, carriers: dict[int, Carrier], shift: Fraction, notes: list[str]
) -> Iterator[Packet]:
    if not carriers:
        return
    packets = source.demux([source.streams[index] for index in carriers])
    while True:
        try:
            packet = next(packets, None)
        except (av.FFmpegError, OSError):
            notes.append("audio and subtitles end where the file can no longer be read")
            packet = None
        if packet is None:
            break
        if packet.size:
            ticks = round(shift / packet.time_base)
            packet.pts = None if packet.pts is None else packet.pts - ticks
            packet.dts = None if packet.dts is None else packet.dts - ticks
            yield from carriers[packet.stream.index].take(packet)
    for carrier in carriers.values():
        yield from carrier.rest()


class _Rising:
    """Converts packets to the time base of their stream and makes decode times rise, as muxers require."""

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

"""The sound of a film, copied packet by packet beside the pictures, at its own times.

Pictures keep their time stamps however long they were under way, so sound fits them again once both are counted from
the same moment.
"""

import math
import os
from collections.abc import Generator, Iterator
from contextlib import suppress
from fractions import Fraction
from pathlib import Path

import av
from av.audio.stream import AudioStream
from av.container import InputContainer, OutputContainer
from av.packet import Packet
from av.stream import Stream

from redline.errors import RedlineError
from redline.stream.continuous_timestamps import ContinuousTimestamps
from redline.video.reading import open_video


class AudioCopy:
    """Sound streams of `path` into `output`; `shift_s` is taken off all times."""

    def __init__(self, path: Path, output: OutputContainer, shift_s: Fraction) -> None:
        self._source = _opened(path)
        self._shift_s = shift_s
        streams = list(self._source.streams.audio)
        self._made: dict[int, Stream] = {s.index: output.add_stream_from_template(s, opaque=True) for s in streams}
        for stream in streams:
            self._made[stream.index].metadata.update(_language(stream))
        self._packets = self._shifted(streams)
        self._next: Packet | None = None
        self._started = False

    def until(self, end_s: Fraction | None) -> Iterator[Packet]:
        """Packets that start before `end_s`, or all that are left; the output's header is written by now."""
        if not self._started:
            self._started, self._next = True, next(self._packets, None)
        while self._next is not None and (end_s is None or _start_s(self._next) < end_s):
            packet, self._next = self._next, next(self._packets, None)
            packet.stream = self._made[packet.stream.index]
            yield packet

    def close(self) -> None:
        self._packets.close()
        self._source.close()

    def _shifted(self, streams: list[AudioStream]) -> Generator[Packet, None, None]:
        last: dict[int, int] = {}
        indices, joined = {stream.index for stream in streams}, ContinuousTimestamps(self._source.format.name)
        # All of them, where a film may be joined: each stream tells where.
        packets = self._source.demux()
        while True:
            try:
                packet = next(packets, None)
            except (av.FFmpegError, OSError) as error:
                raise RedlineError(f"the sound of {self._source.name!r} cannot be read to its end.") from error
            if packet is None:
                return
            joined.move(packet)
            dts = packet.dts if packet.dts is not None else packet.pts
            if not packet.size or dts is None or packet.stream.index not in indices:
                continue
            ticks = round(self._shift_s / Fraction(packet.time_base))
            index = packet.stream.index
            # A muxer refuses times that do not rise by its own clock, as films that were cut badly have.
            step = max(1, math.ceil(Fraction(self._made[index].time_base or 1) / Fraction(packet.time_base)))
            dts = max(dts - ticks, last.get(index, dts - ticks - step) + step)
            last[index] = dts
            packet.pts = dts if packet.pts is None else max(packet.pts - ticks, dts)
            packet.dts = dts
            yield packet


def check_audio_copy(path: Path, container: str, suffix: str) -> None:
    """Tried out: what a container says it holds is more than what its header can be written with."""
    with _opened(path) as source:
        for stream in source.streams.audio:
            name = stream.codec_context.name if stream.codec_context else "unknown"
            trial = av.open(os.devnull, "w", format=container)
            try:
                trial.add_stream_from_template(stream, opaque=True)
                trial.start_encoding()
            except (ValueError, AttributeError, av.FFmpegError) as error:
                text = f"the sound of {path.name!r} ({name}) cannot be copied into a {suffix} file: choose .mkv."
                raise RedlineError(text) from error
            finally:
                with suppress(ValueError, av.FFmpegError):
                    trial.close()


def _opened(path: Path) -> InputContainer:
    if not path.is_file():
        raise RedlineError(f"{str(path)!r}, of which the sound is wanted, does not exist.")
    return open_video(path)


def _start_s(packet: Packet) -> Fraction:
    return (packet.dts or 0) * Fraction(packet.time_base)


def _language(stream: Stream) -> dict[str, str]:
    return {name: text for name, text in stream.metadata.items() if name.lower() in ("language", "title")}

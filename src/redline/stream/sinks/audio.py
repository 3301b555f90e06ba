"""Copies the audio of a video file packet by packet, without encoding, and keeps its timestamps.

Frames keep their timestamps however long they take to process, so audio and video stay in sync if their timestamps have
the same origin.
"""

import math
from collections.abc import Generator, Iterator
from fractions import Fraction
from pathlib import Path

from av.audio.stream import AudioStream
from av.container import InputContainer, OutputContainer
from av.packet import Packet
from av.stream import Stream

from redline.errors import RedlineError
from redline.stream.continuous_timestamps import ContinuousTimestamps
from redline.video.reading import opened, packets
from redline.video.writing import can_hold


class AudioCopy:
    """Copies the audio streams of `path` to `output`, and subtracts `shift_s` from all timestamps."""

    def __init__(self, path: Path, output: OutputContainer, shift_s: Fraction) -> None:
        self._source = _opened(path)
        self._shift_s = shift_s
        streams = list(self._source.streams.audio)
        self._targets: dict[int, Stream] = {s.index: output.add_stream_from_template(s, opaque=True) for s in streams}
        for stream in streams:
            kept = {name: text for name, text in stream.metadata.items() if name.lower() in ("language", "title")}
            self._targets[stream.index].metadata.update(kept)
        self._packets = self._shifted(streams)
        self._next: Packet | None = None
        self._started = False

    def until(self, end_s: Fraction | None) -> Iterator[Packet]:
        """Yields the packets that start before `end_s`, or all remaining packets. Needs a written output header."""
        if not self._started:
            self._started, self._next = True, next(self._packets, None)
        while self._next is not None and (end_s is None or _start_s(self._next) < end_s):
            packet, self._next = self._next, next(self._packets, None)
            packet.stream = self._targets[packet.stream.index]
            yield packet

    def close(self) -> None:
        self._packets.close()
        self._source.close()

    def _shifted(self, streams: list[AudioStream]) -> Generator[Packet, None, None]:
        last: dict[int, int] = {}
        indices, timestamps = {stream.index for stream in streams}, ContinuousTimestamps(self._source.format.name)
        # Reads all streams, because any of them may show where recordings were concatenated.
        for packet in packets(self._source, None, self._source.name):
            timestamps.shift(packet)
            dts = packet.dts if packet.dts is not None else packet.pts
            if not packet.size or dts is None or packet.stream.index not in indices:
                continue
            ticks = round(self._shift_s / Fraction(packet.time_base))
            index = packet.stream.index
            # Badly cut videos repeat timestamps, but a muxer requires that they increase, also in its own time base.
            step = max(1, math.ceil(Fraction(self._targets[index].time_base or 1) / Fraction(packet.time_base)))
            dts = max(dts - ticks, last.get(index, dts - ticks - step) + step)
            last[index] = dts
            packet.pts = dts if packet.pts is None else max(packet.pts - ticks, dts)
            packet.dts = dts
            yield packet


def check_audio_copy(path: Path, container: str, suffix: str) -> None:
    """Raises RedlineError if a trial shows that the container does not support the audio codec."""
    with _opened(path) as source:
        for stream in source.streams.audio:
            name = stream.codec_context.name if stream.codec_context else "unknown"
            if not can_hold(container, stream):
                raise RedlineError(f"{suffix} does not support the audio of {path.name!r} ({name}): write a .mkv file.")


def _opened(path: Path) -> InputContainer:
    if not path.is_file():
        raise RedlineError(f"cannot read the audio of {str(path)!r}: the file does not exist.")
    return opened(path)


def _start_s(packet: Packet) -> Fraction:
    return (packet.dts or 0) * Fraction(packet.time_base)

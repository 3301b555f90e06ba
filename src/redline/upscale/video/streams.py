"""Copies audio, subtitles and other streams; converts or leaves out those that the container cannot hold.

A note says what was converted or left out.
"""

from collections.abc import Callable
from pathlib import Path

import av
from av.audio.stream import AudioStream
from av.codec import Codec
from av.container import InputContainer, OutputContainer
from av.packet import Packet
from av.stream import Disposition, Stream
from av.subtitles.stream import SubtitleStream

from redline.errors import RedlineError
from redline.video.reading import opened
from redline.video.writing import can_hold, trial_output

# Tags about the file itself, which are wrong in another file.
_OF_THE_FILE = ("bps", "duration", "number_of_frames", "number_of_bytes", "_statistics", "encoder", "rotate")
_OF_THE_CONTAINER = ("major_brand", "minor_version", "compatible_brands", "encoder", "duration")
_AUDIO_CODECS = {"mp4": "aac", "mov": "aac", "matroska": "flac", "webm": "libopus"}
_SUBTITLE_CODECS = {"mp4": "mov_text", "mov": "mov_text", "matroska": "srt", "webm": "webvtt"}
_BITS_PER_S_PER_CHANNEL = 96_000
_COVERS = {"mjpeg": ("cover.jpg", "image/jpeg"), "png": ("cover.png", "image/png")}


# Converts a packet of a source stream to packets to write. A final call with None returns the remaining packets.
Carrier = Callable[[Packet | None], list[Packet]]


def _copied(made: Stream) -> Carrier:
    def carry(packet: Packet | None) -> list[Packet]:
        if packet is None:
            return []
        packet.stream = made
        return [packet]

    return carry


def _converted_audio(source: AudioStream, made: AudioStream) -> Carrier:
    def carry(packet: Packet | None) -> list[Packet]:
        try:
            frames = source.decode(packet)
        except av.FFmpegError:
            # A damaged packet causes only a short gap in the audio, so the rest is kept.
            frames = []
        packets = [encoded for frame in frames for encoded in made.encode(frame)]
        return packets if packet is not None else packets + list(made.encode(None))

    return carry


def _converted_subtitles(source: SubtitleStream, made: SubtitleStream) -> Carrier:
    def carry(packet: Packet | None) -> list[Packet]:
        try:
            shown = source.decode2(packet) if packet is not None else None
            if packet is None or shown is None or not len(shown):
                return []
            encoded = made.codec_context.encode_subtitle(shown)
        except av.FFmpegError:
            # An unreadable subtitle is left out, as players do.
            return []
        encoded.pts = encoded.dts = packet.pts
        encoded.duration, encoded.time_base, encoded.stream = packet.duration, packet.time_base, made
        return [encoded]

    return carry


def carry_streams(
    source: InputContainer, output: OutputContainer, container: str, video_index: int
) -> tuple[dict[int, Carrier], list[str]]:
    """Returns a carrier for every stream that the output can hold, by stream index, and notes on the others."""
    carriers: dict[int, Carrier] = {}
    notes: list[str] = []
    for stream in source.streams:
        if stream.index == video_index or _is_chapter_text(source, stream):
            continue
        carrier, note = _carrier(source, stream, output, container)
        if carrier is not None:
            carriers[stream.index] = carrier
        if note:
            notes.append(note)
    return carriers, notes


def check_other_streams(source_path: Path, video_index: int, container: str) -> None:
    """Raises `RedlineError` if the other streams cannot be written, before any work is done."""
    with opened(source_path) as source:
        try:
            with trial_output(container) as trial:
                carriers, _ = carry_streams(source, trial, container, video_index)
                if carriers:
                    trial.start_encoding()
        except (ValueError, av.FFmpegError) as error:
            what = f"the audio or subtitles of {source_path.name!r}"
            raise RedlineError(f"{what} cannot be written as {container} ({error}): choose .mkv.") from error


def copy_tags(source: Stream, made: Stream) -> None:
    """Copies title, language and disposition."""
    made.metadata.update(stream_tags(source))
    made.disposition = source.disposition


def stream_tags(stream: Stream) -> dict[str, str]:
    tags = {name: text for name, text in stream.metadata.items() if not name.lower().startswith(_OF_THE_FILE)}
    # PyAV reads the title of an MP4 stream as the tag "name", but writes it only from the tag "title".
    return {"title": tags.pop("name"), **tags} if "name" in tags else tags


def container_tags(source: InputContainer) -> dict[str, str]:
    return {name: text for name, text in source.metadata.items() if name.lower() not in _OF_THE_CONTAINER}


def _carrier(
    source: InputContainer, stream: Stream, output: OutputContainer, container: str
) -> tuple[Carrier | None, str | None]:
    name = _describe(stream)
    if stream.type == "attachment":
        if container != "matroska":
            return None, f"{name} is left out: only .mkv holds attachments"
        output.add_stream_from_template(stream)
        return None, None
    if stream.disposition & Disposition.attached_pic:
        return _cover(source, stream, output, container)
    if stream.codec_context is None or stream.type not in ("video", "audio", "subtitle"):
        return None, f"{name} is left out: it cannot be copied"
    if can_hold(container, stream):
        made = output.add_stream_from_template(stream, opaque=True)
        copy_tags(stream, made)
        return _copied(made), f"{name} is copied without upscaling" if stream.type == "video" else None
    return _converted(stream, output, container, name)


def _converted(stream: Stream, output: OutputContainer, container: str, name: str) -> tuple[Carrier | None, str | None]:
    if isinstance(stream, AudioStream):
        wanted = _AUDIO_CODECS[container]
        rates = Codec(wanted, "w").audio_rates
        rate = stream.rate if rates is None or stream.rate in rates else 48_000
        bit_rate = _BITS_PER_S_PER_CHANNEL * stream.channels
        made = output.add_stream(wanted, rate=rate, layout=stream.layout.name, bit_rate=bit_rate)
        assert isinstance(made, AudioStream)
        copy_tags(stream, made)
        return _converted_audio(stream, made), f"{name} is converted to {wanted}, which {container} can hold"
    if isinstance(stream, SubtitleStream) and stream.codec_context.codec.text_sub:
        wanted = _SUBTITLE_CODECS[container]
        made = output.add_stream(wanted)
        assert isinstance(made, SubtitleStream)
        stream.codec_context.open(strict=False)
        made.codec_context.subtitle_header = stream.codec_context.subtitle_header
        copy_tags(stream, made)
        return _converted_subtitles(stream, made), f"{name} is converted to {wanted}, which {container} can hold"
    return None, f"{name} is left out: {container} cannot hold it"


def _cover(
    source: InputContainer, stream: Stream, output: OutputContainer, container: str
) -> tuple[Carrier | None, str | None]:
    """Copies a cover image: Matroska stores it as an attachment, MP4 as a stream of one packet."""
    codec = stream.codec_context.name if stream.codec_context else ""
    if container in ("mov", "webm") or codec not in _COVERS:
        return None, f"the cover image is left out: {container} cannot hold it"
    if container == "matroska":
        # Opens the source again, because demuxing here would consume packets of other streams.
        with opened(Path(source.name.removeprefix("file:"))) as again:
            packet = next((packet for packet in again.demux(again.streams[stream.index]) if packet.size), None)
            if packet is not None:
                output.add_attachment(*_COVERS[codec], bytes(packet))
        return None, None if packet is not None else "the cover image is left out: it is empty"
    made = output.add_stream_from_template(stream, opaque=True)
    copy_tags(stream, made)
    return _copied(made), None


def _is_chapter_text(source: InputContainer, stream: Stream) -> bool:
    """Returns whether the stream holds MP4 chapter titles, which are written again with the chapters."""
    return stream.type == "data" and getattr(stream, "name", None) == "bin_data" and bool(source.chapters())


def _describe(stream: Stream) -> str:
    kind = stream.type
    codec = stream.codec_context.name if stream.codec_context else getattr(stream, "name", None)
    details = [detail for detail in (codec, stream.metadata.get("language")) if detail]
    return f"{kind} stream {stream.index}" + (f" ({', '.join(details)})" if details else "")

"""Writes a video file, under a temporary name until it is complete. Every frame keeps its exact time.

A live recording cannot be repeated, so it is written in fragments that reach the disk within a second, and survives a
full disk or a killed process. The next recording in the folder recovers the file of a killed process.

B-frames are disabled, so that the encoder returns frames in display order and timestamps may be irregular.
"""

import os
from contextlib import suppress
from fractions import Fraction
from itertools import count
from pathlib import Path

import av
from av.container import OutputContainer
from av.packet import Packet
from av.video.frame import VideoFrame
from av.video.reformatter import ColorRange, Colorspace, Interpolation, VideoReformatter
from av.video.stream import VideoStream

from redline.errors import RedlineError
from redline.files.partial import abandoned_recordings, hidden_path, recording_path, remove_abandoned
from redline.stream.choices import VIDEO_CONTAINERS
from redline.stream.frames import Frame
from redline.stream.sinks import Sink
from redline.stream.sinks.audio import AudioCopy, check_audio_copy
from redline.video.reading import first_frame, main_stream, opened
from redline.video.truncated import complete_bytes
from redline.video.writing import exact_clock, open_encoder, open_output

_BT709 = 1
# The length of the fragments of a live recording. The encoder delays no frames, so at most two seconds are lost if the
# process is killed or the disk is full.
_FRAGMENT_S = 1
_KEY_FRAME_EVERY_S = 2
_NO_DELAY = {"rc-lookahead": "0"}


class VideoFileSink(Sink):
    """Writes frames to a video file.

    The source's time `origin_s` becomes 0 in the file; if it is None, the time of the first frame becomes 0.

    `audio` is the video whose audio is copied. If writing fails, the part of an `is_live` recording that was written is
    kept. `notes` lists the recordings that were recovered in the folder.
    """

    takes_new_size = False

    def __init__(
        self,
        path: Path,
        rate: Fraction,
        *,
        origin_s: Fraction | None = Fraction(0),
        audio: Path | None = None,
        is_live: bool = False,
        crf: int = 18,
    ) -> None:
        if path.suffix.lower() not in VIDEO_CONTAINERS:
            raise RedlineError(f"unknown video format {path.name!r} (supported: {', '.join(VIDEO_CONTAINERS)}).")
        if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
            reason = "it is a folder" if path.is_dir() else "its folder does not exist or is not writable"
            raise RedlineError(f"cannot write {str(path)!r}: {reason}.")
        if audio is not None:
            if path.exists() and audio.exists() and path.samefile(audio):
                raise RedlineError(f"cannot write {str(path)!r}: it is the source.")
            check_audio_copy(audio, VIDEO_CONTAINERS[path.suffix.lower()], path.suffix)
        self.name, self.path, self._rate = path.name, path, Fraction(rate)
        self._origin_s, self._audio, self._is_live = origin_s, audio, is_live
        self._options = {"crf": str(crf), "preset": "veryfast", "bf": "0"}
        if is_live:
            self._options |= {**_NO_DELAY, "g": str(max(1, round(_KEY_FRAME_EVERY_S * self._rate)))}
        self._writer: _VideoWriter | None = None
        self.notes = recover_recordings(path.parent)

    def write(self, frame: Frame) -> None:
        try:
            if self._writer is None:
                self._writer = _VideoWriter(self, frame)
            self._writer.add(frame)
        except (OSError, av.FFmpegError) as error:
            raise self._write_error(error) from error

    def close(self, complete: bool = True) -> None:
        """Finishes the file and moves it to its path. Without a frame no file is written."""
        if self._writer is None:
            return
        try:
            self._writer.finish(complete)
            os.replace(self._writer.partial, self.path)
        except (OSError, av.FFmpegError) as error:
            raise self._write_error(error) from error
        finally:
            self.abandon()

    def abandon(self) -> None:
        if self._writer is not None:
            self._writer.discard()
            self._writer = None

    def _write_error(self, error: Exception) -> RedlineError:
        text = f"cannot write {str(self.path)!r}: {getattr(error, 'strerror', None) or error}."
        if self._is_live and self._writer is not None and self._writer.keep_partial(self.path):
            text = f"{text[:-1]}; the recording up to then is kept."
        return RedlineError(text)


class _VideoWriter:
    """The temporary file and its encoder."""

    def __init__(self, sink: VideoFileSink, first: Frame) -> None:
        path = sink.path
        remove_abandoned(path.parent)
        self.partial = recording_path(path) if sink._is_live else hidden_path(path)
        self._size, self._time_base = (first.height, first.width), first.time_base
        self._pixel_aspect = first.pixel_aspect
        self._origin_s = first.time_s if sink._origin_s is None else sink._origin_s
        self._default_duration = max(1, round(1 / sink._rate / first.time_base))
        self._last: int | None = None
        # Durations of the frames inside the encoder, stored here because the encoder does not return them.
        self._durations: dict[int, int] = {}
        self._end_s = Fraction(0)
        self._to_yuv = VideoReformatter()
        self._audio: AudioCopy | None = None
        self._output: OutputContainer | None = None
        try:
            self._output = _open(self.partial, VIDEO_CONTAINERS[path.suffix.lower()], first.time_base, sink._is_live)
            self._stream = self._add_stream(self._output, sink)
            if sink._audio is not None:
                self._audio = AudioCopy(sink._audio, self._output, self._origin_s)
            self._output.start_encoding()
        except BaseException:
            self.discard()
            raise

    def add(self, frame: Frame) -> None:
        height, width = self._size
        if (frame.height, frame.width) != self._size:
            text = f"the frame size changes to {frame.width}×{frame.height}, but the video is {width}×{height}."
            raise RedlineError(text)
        image = self._to_yuv.reformat(
            VideoFrame.from_ndarray(frame.pixels.contiguous().numpy(), "rgb24"),
            format=self._stream.codec_context.pix_fmt,
            dst_colorspace=Colorspace.ITU709,
            dst_color_range=ColorRange.MPEG,
            interpolation=Interpolation.BICUBIC,
        )
        pts = round((frame.time_s - self._origin_s) / self._time_base)
        pts = pts if self._last is None else max(pts, self._last + 1)
        duration = round(frame.duration * frame.time_base / self._time_base) or self._default_duration
        image.pts, image.duration, image.time_base = pts, duration, self._time_base
        self._last, self._end_s = pts, (pts + duration) * self._time_base
        self._durations[pts] = duration
        self._mux(self._stream.encode(image))

    def finish(self, complete: bool) -> None:
        self._mux(self._stream.encode(None))
        assert self._output is not None
        if self._audio is not None:
            # If the stream was stopped, the audio ends with the last frame.
            for audio_packet in self._audio.until(None if complete else self._end_s):
                self._output.mux(audio_packet)
        self._output.close()
        self._output = None

    def keep_partial(self, path: Path) -> bool:
        """Moves the playable part of the file to the path. Returns False if it has no frame."""
        self._close()
        with suppress(OSError):
            if trim_to_playable(self.partial):
                os.replace(self.partial, path)
                return True
        return False

    def discard(self) -> None:
        self._close()
        self.partial.unlink(missing_ok=True)

    def _close(self) -> None:
        if self._audio is not None:
            self._audio.close()
        if self._output is not None:
            # Closing writes the remaining data, which fails if writing failed before.
            with suppress(OSError, ValueError, av.FFmpegError):
                self._output.close()
            self._output = None

    def _mux(self, packets: list[Packet]) -> None:
        assert self._output is not None
        for packet in packets:
            if self._audio is not None:
                for audio_packet in self._audio.until((packet.pts or 0) * Fraction(packet.time_base)):
                    self._output.mux(audio_packet)
            if packet.pts is not None and (duration := self._durations.pop(packet.pts, None)) is not None:
                packet.duration = duration
            self._output.mux(packet)

    def _add_stream(self, output: OutputContainer, sink: VideoFileSink) -> VideoStream:
        height, width = self._size
        stream = output.add_stream("libx264", rate=sink._rate.limit_denominator(1001), options=sink._options)
        assert isinstance(stream, VideoStream)
        context = stream.codec_context
        # Chroma subsampling needs even sides.
        even = height % 2 == 0 and width % 2 == 0
        context.width, context.height, context.pix_fmt = width, height, "yuv420p" if even else "yuv444p"
        context.time_base = stream.time_base = self._time_base
        context.sample_aspect_ratio = self._pixel_aspect
        context.colorspace = context.color_primaries = context.color_trc = _BT709
        context.color_range = ColorRange.MPEG
        # Frame threads delay frames; slice threads do not, but make the file slightly larger.
        context.thread_type = "SLICE" if sink._is_live else "AUTO"
        open_encoder(stream, sink._options)
        return stream


def _open(path: Path, container: str, time_base: Fraction, is_live: bool) -> OutputContainer:
    options: dict[str, str] = {}
    if is_live:
        # Frames must not wait for an audio stream that has ended.
        options |= {"flush_packets": "1", "max_interleave_delta": str(_FRAGMENT_S * av.time_base // 4)}
    if is_live and container == "matroska":
        # A Matroska cluster ends only after it exceeds this limit, so the limit is 1 ms shorter than a fragment.
        options |= {"cluster_time_limit": str(_FRAGMENT_S * 1000 - 1)}
    elif is_live:
        # Writes fragments, and turns a finished recording into a regular file; `delay_moov` lets audio begin before 0.
        options |= {
            "movflags": "+hybrid_fragmented+delay_moov",
            "frag_duration": str(_FRAGMENT_S * av.time_base),
        }
    # MP4 stores the time of the first frame in this time scale.
    return open_output(path, container, exact_clock([time_base.denominator], otherwise=1000), **options)


def recover_recordings(folder: Path) -> tuple[str, ...]:
    """Renames the recordings of killed processes in the folder to `NAME.recovered.mp4`, and deletes those without a
    frame. Returns a note for each."""
    notes = list[str]()
    for left, target in abandoned_recordings(folder):
        if target.suffix.lower() not in VIDEO_CONTAINERS:
            continue
        with suppress(OSError):  # another process recovered the file first, or permission is denied
            if not trim_to_playable(left):
                left.unlink()
                notes.append(f"deleted {left.name!r}, a recording whose process was killed before its first frame.")
                continue
            kept = _unused_name(target)
            os.rename(left, kept)
            notes.append(f"recovered {kept.name!r}, a recording whose process was killed.")
    return tuple(notes)


def trim_to_playable(path: Path) -> bool:
    """Removes the incomplete part at the end of the file. Returns whether the rest has a frame."""
    os.truncate(path, complete_bytes(path))
    try:
        with opened(path) as video:
            first_frame(video, main_stream(video, path), path)
    except RedlineError:
        return False
    return True


def _unused_name(target: Path) -> Path:
    """Returns a path beside the target that does not exist."""
    names = (f"{target.stem}.recovered{f'-{number}' if number > 1 else ''}{target.suffix}" for number in count(1))
    return next(path for name in names if not (path := target.with_name(name)).exists())

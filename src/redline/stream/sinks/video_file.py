"""A film, written beside its place and moved there when it is whole; every frame keeps its exact time.

A live recording will not come again: it is written in pieces that are on the disk a second later, so that neither a
full disk nor a killed process takes it away. What a killed process left is kept by the next recording in that folder.

No frame refers to a later one (no B-frames): frames leave the encoder in the order of showing, and steady times are
not needed.
"""

import math
import os
from contextlib import suppress
from fractions import Fraction
from pathlib import Path

import av
from av.container import OutputContainer
from av.packet import Packet
from av.video.frame import VideoFrame
from av.video.reformatter import ColorRange, Colorspace, Interpolation, VideoReformatter
from av.video.stream import VideoStream

from redline.choices import VIDEO_CONTAINERS
from redline.errors import RedlineError
from redline.files.partial import hidden_path, recording_path, remove_abandoned
from redline.stream.frames import Frame
from redline.stream.sinks.audio import AudioCopy, check_audio_copy
from redline.stream.sinks.recovery import recover_recordings, trim_to_playable

_BT709 = 1
_FINEST_CLOCK = (1 << 31) - 1
# Of a live recording at most two seconds are lost when the process is killed or the disk is full: a piece of it is on
# the disk when it is this long, and the encoder holds back no frame.
_PIECE_S = 1
_KEY_FRAME_EVERY_S = 2
_NO_DELAY = {"rc-lookahead": "0"}


class VideoFileSink:
    """`origin_s` is the time, on the source's clock, that becomes 0 in the film; None takes the first frame's.

    Of an `is_live` recording that cannot be written on, what is there is kept. `sound` is the film whose sound is
    copied. It needs no delay: pictures keep their times however long they took. `notes` say what was recovered in the
    folder.
    """

    takes_new_size = False

    def __init__(
        self,
        path: Path,
        rate: Fraction,
        *,
        origin_s: Fraction | None = Fraction(0),
        sound: Path | None = None,
        is_live: bool = False,
        crf: int = 18,
        preset: str = "veryfast",
    ) -> None:
        if path.suffix.lower() not in VIDEO_CONTAINERS:
            raise RedlineError(f"a film is written as {', '.join(VIDEO_CONTAINERS)}, not {path.name!r}.")
        if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
            reason = "it is a folder" if path.is_dir() else "its folder is not there, or may not be written to"
            raise RedlineError(f"cannot write {str(path)!r}: {reason}.")
        if sound is not None:
            if path.exists() and sound.exists() and path.samefile(sound):
                raise RedlineError(f"{str(path)!r} would be written over the film that it is made of.")
            check_audio_copy(sound, VIDEO_CONTAINERS[path.suffix.lower()], path.suffix)
        self.name, self._path, self._rate = path.name, path, Fraction(rate)
        self._origin_s, self._sound, self._is_live = origin_s, sound, is_live
        self._options = {"crf": str(crf), "preset": preset, "bf": "0"}
        if is_live:
            self._options |= {**_NO_DELAY, "g": str(max(1, round(_KEY_FRAME_EVERY_S * self._rate)))}
        self._film: _VideoWriter | None = None
        self.notes = recover_recordings(path.parent)

    def write(self, frame: Frame) -> None:
        try:
            if self._film is None:
                self._film = _VideoWriter(self, frame)
            self._film.add(frame)
        except (OSError, av.FFmpegError) as error:
            raise self._ended_by(error) from error

    def close(self, whole: bool = True) -> None:
        """Without a single frame no film is written."""
        if self._film is None:
            return
        try:
            self._film.finish(whole)
            os.replace(self._film.partial, self._path)
        except (OSError, av.FFmpegError) as error:
            raise self._ended_by(error) from error
        finally:
            self.abandon()

    def abandon(self) -> None:
        if self._film is not None:
            self._film.let_go()
            self._film = None

    def _ended_by(self, error: Exception) -> RedlineError:
        text = why_not_written(self._path, error)
        if self._is_live and self._film is not None and self._film.keep_what_is_there(self._path):
            text = f"{text[:-1]}; what was recorded before is kept."
        return RedlineError(text)


class _VideoWriter:
    """The file that is being written."""

    def __init__(self, sink: VideoFileSink, first: Frame) -> None:
        path = sink._path
        remove_abandoned(path.parent)
        self.partial = recording_path(path) if sink._is_live else hidden_path(path)
        self._size, self._time_base = (first.height, first.width), first.time_base
        self._pixel_aspect = first.pixel_aspect
        self._origin_s = first.time_s if sink._origin_s is None else sink._origin_s
        self._usual = max(1, round(1 / sink._rate / first.time_base))
        self._last: int | None = None
        # How long pictures last that the encoder still has: it does not hand that on.
        self._lasts: dict[int, int] = {}
        self._end_s = Fraction(0)
        self._to_yuv = VideoReformatter()
        self._sound: AudioCopy | None = None
        self._output: OutputContainer | None = None
        try:
            self._output = _open(self.partial, VIDEO_CONTAINERS[path.suffix.lower()], first.time_base, sink._is_live)
            self._stream = self._add_stream(self._output, sink)
            if sink._sound is not None:
                self._sound = AudioCopy(sink._sound, self._output, self._origin_s)
            self._output.start_encoding()
        except BaseException:
            self.let_go()
            raise

    def add(self, frame: Frame) -> None:
        height, width = self._size
        if (frame.height, frame.width) != self._size:
            text = f"the film is {width}×{height} and cannot go on with pictures of {frame.width}×{frame.height}."
            raise RedlineError(text)
        picture = self._to_yuv.reformat(
            VideoFrame.from_ndarray(frame.pixels.contiguous().numpy(), "rgb24"),
            format=self._stream.codec_context.pix_fmt,
            dst_colorspace=Colorspace.ITU709,
            dst_color_range=ColorRange.MPEG,
            interpolation=Interpolation.BICUBIC,
        )
        pts = round((frame.time_s - self._origin_s) / self._time_base)
        pts = pts if self._last is None else max(pts, self._last + 1)
        lasts = round(frame.duration * frame.time_base / self._time_base) or self._usual
        picture.pts, picture.duration, picture.time_base = pts, lasts, self._time_base
        self._last, self._end_s = pts, (pts + lasts) * self._time_base
        self._lasts[pts] = lasts
        self._mux(self._stream.encode(picture))

    def finish(self, whole: bool) -> None:
        self._mux(self._stream.encode(None))
        assert self._output is not None
        if self._sound is not None:
            # A film that was stopped ends there, not with the rest of its sound.
            for heard in self._sound.until(None if whole else self._end_s):
                self._output.mux(heard)
        self._output.close()
        self._output = None

    def keep_what_is_there(self, path: Path) -> bool:
        """Whether there is a picture in it."""
        self._close()
        try:
            if trim_to_playable(self.partial):
                os.replace(self.partial, path)
                return True
        except OSError:
            pass
        return False

    def let_go(self) -> None:
        self._close()
        self.partial.unlink(missing_ok=True)

    def _close(self) -> None:
        if self._sound is not None:
            self._sound.close()
        if self._output is not None:
            # Closing writes what is missing, which fails where writing failed before.
            with suppress(OSError, ValueError, av.FFmpegError):
                self._output.close()
            self._output = None

    def _mux(self, packets: list[Packet]) -> None:
        assert self._output is not None
        for packet in packets:
            if self._sound is not None:
                for heard in self._sound.until((packet.pts or 0) * Fraction(packet.time_base)):
                    self._output.mux(heard)
            if packet.pts is not None and (lasts := self._lasts.pop(packet.pts, None)) is not None:
                packet.duration = lasts
            self._output.mux(packet)

    def _add_stream(self, output: OutputContainer, sink: VideoFileSink) -> VideoStream:
        height, width = self._size
        stream = output.add_stream("libx264", rate=sink._rate.limit_denominator(1001), options=sink._options)
        assert isinstance(stream, VideoStream)
        context = stream.codec_context
        # Halved colour needs even sides.
        even = height % 2 == 0 and width % 2 == 0
        context.width, context.height, context.pix_fmt = width, height, "yuv420p" if even else "yuv444p"
        context.time_base = stream.time_base = self._time_base
        context.sample_aspect_ratio = self._pixel_aspect
        context.colorspace = context.color_primaries = context.color_trc = _BT709
        context.color_range = ColorRange.MPEG
        # Threads over slices cut every picture into bands, which costs some bytes; those over frames hold frames back.
        context.thread_type = "SLICE" if sink._is_live else "AUTO"
        try:
            context.open()
        except (ValueError, av.FFmpegError) as error:
            raise RedlineError(f"libx264 cannot encode {width}×{height} pictures with {sink._options}.") from error
        return stream


def _open(path: Path, container: str, time_base: Fraction, is_live: bool) -> OutputContainer:
    if container == "matroska":
        # Sound that starts a little before 0, as AAC does in MP4, would move all times.
        options = {"avoid_negative_ts": "disabled"}
    else:
        # The first frame's time is counted on this clock in MP4.
        clock = math.lcm(1000, time_base.denominator)
        options = {"movie_timescale": str(clock if clock <= _FINEST_CLOCK else 1000)}
    if is_live:
        # Sound that has ended must not keep pictures waiting for it.
        options |= {"flush_packets": "1", "max_interleave_delta": str(_PIECE_S * av.time_base // 4)}
    if is_live and container == "matroska":
        # A cluster ends behind this time, not at it.
        options |= {"cluster_time_limit": str(_PIECE_S * 1000 - 1)}
    elif is_live:
        # Fragments while it is written, and an ordinary file when it is finished; sound may begin before 0 in both.
        options |= {
            "movflags": "+hybrid_fragmented+delay_moov",
            "frag_duration": str(_PIECE_S * av.time_base),
        }
    return av.open(f"file:{path}", "w", format=container, container_options=options)


def why_not_written(path: Path, error: Exception) -> str:
    return f"cannot write {str(path)!r}: {getattr(error, 'strerror', None) or error}."

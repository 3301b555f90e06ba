"""Opens video files through PyAV, and raises RedlineError with a clear message if they cannot be read."""

import codecs
from collections.abc import Iterator
from contextlib import suppress
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any, cast

import av
from av.container import InputContainer
from av.packet import Packet
from av.sidedata.sidedata import SideData, Type
from av.stream import Disposition
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from redline.errors import RedlineError
from redline.machine.cores import cores

_DAMAGED_START = 1000
_FASTEST, _PACKETS_TIMED = 240, 100
_DECODED_PER_THREAD, _CONVERTED_PER_THREAD, _MOST_THREADS = 2**17, 2**16, 16
# Codecs that usually encode a frame as one slice, so that slice threads do not help. VP8 is not listed: its decoder
# distributes rows over threads instead, and reports some damage only when it does so.
_ONE_SLICE = ("h264", "hevc", "mpeg4", "vp9")
_MAX_FRAME_THREADS = 6
# Demuxers that read one file only. Playlists (HLS, DASH, ffconcat, image sequences) open other files and addresses that
# they name, so a file from an untrusted source could pull in any local file.
_FORMATS = (
    "mov,matroska,avi,mpegts,mpeg,mpegvideo,flv,asf,ogg,nut,mxf,gxf,gif,apng,ivf,obu,av1,h261,h263,h264,hevc,vvc,m4v,"
    "mjpeg,vc1,cavsvideo,dirac,dnxhd,dv,yuv4mpegpipe,rm,nsv,nuv,wtv,swf,smk,bink,flic,roq,jpegxl_anim,webp,"
    "png_pipe,jpeg_pipe,webp_pipe,bmp_pipe,tiff_pipe,gif_pipe,ppm_pipe,jpegxl_pipe,j2k_pipe,exr_pipe,dpx_pipe"
)
# Formats whose timestamps start at an arbitrary value, and the length of their ticks in seconds.
ARBITRARY_START_FORMATS = ("mpegts", "mpeg", "mpegtsraw")
TICK_90KHZ = Fraction(1, 90_000)
_PLAYLIST_STARTS, _XML_STARTS, _PLAYLIST_BYTES = (b"#EXTM3U", b"ffconcat", b"<MPD"), (b"<?xml", b"<!--"), 4096
_ONE_FILE = {"protocol_whitelist": "file", "format_whitelist": _FORMATS}


def opened(path: Path) -> InputContainer:
    """Opens a local video, and no other file that it may refer to. Raises RedlineError if it is not a video.

    The container is a context manager, which closes the file.
    """
    try:
        # "file:" prevents FFmpeg from parsing a name with a colon as a protocol. Tags that are not valid UTF-8 are
        # kept.
        return av.open(f"file:{path}", options=_ONE_FILE, metadata_errors="surrogateescape")
    except (av.FFmpegError, OSError) as error:
        raise RedlineError(_why_not(path, error)) from error


def main_stream(container: InputContainer, path: Path) -> VideoStream:
    """Returns the video stream that a player would show."""
    cover = Disposition.attached_pic | Disposition.timed_thumbnails
    candidates = [stream for stream in container.streams.video if not stream.disposition & cover]
    if not candidates:
        cover_only = " except a cover image" if container.streams.video else ""
        raise RedlineError(f"{path.name!r} has no video stream{cover_only}.")
    best = container.streams.best("video")
    stream = next((stream for stream in candidates if best is not None and stream.index == best.index), candidates[0])
    if stream.codec_context is None:
        raise RedlineError(f"there is no decoder for the video codec of {path.name!r}.")
    # Slice threads are the default, because frame threads silently lose the frames after damage near the end of the
    # file. Callers of `enable_frame_threads` must therefore detect damage and read the file again.
    stream.thread_type = "SLICE"
    stream.codec_context.thread_count = _threads(stream.height * stream.width, _DECODED_PER_THREAD)
    return stream


def conversion_threads(pixels: int) -> int:
    """Returns the number of threads for the conversion of this many pixels to RGB."""
    return _threads(pixels, _CONVERTED_PER_THREAD)


def _threads(pixels: int, each: int) -> int:
    """Returns the number of threads: fewer for small images, where more threads would only add jitter."""
    return max(1, min(cores(), _MOST_THREADS, pixels // each))


def enable_frame_threads(stream: VideoStream) -> int:
    """Enables frame threads if they help this codec. Returns how many frames are decoded at a time, or 1."""
    context = stream.codec_context
    count = frame_threads()
    if count < 2 or context.name not in _ONE_SLICE:
        return 1
    stream.thread_type = "FRAME"
    context.thread_count = count
    # Without this flag, the decoder may return a damaged frame before the frame's thread finds the damage, and does
    # not mark the frame as corrupt. With the flag, an error is raised first, in the order of the packets.
    context.options = {**context.options, "err_detect": "explode"}
    return count


def frame_threads() -> int:
    """Returns how many frames to decode at a time: half of the cores, because the model needs the others."""
    return min(cores() // 2, _MAX_FRAME_THREADS)


def first_frame(container: InputContainer, stream: VideoStream, path: Path) -> VideoFrame:
    """Returns the first frame that can be decoded."""
    frame = intact_frame(stream, packets(container, stream, path.name), _DAMAGED_START)
    if frame is None:
        raise RedlineError(f"no frame of {path.name!r} can be decoded.")
    return frame


def intact_frame(stream: VideoStream, packets: Iterator[Packet], most: int) -> VideoFrame | None:
    """Returns the first intact frame in the next `most` packets; before the first key frame, decoding may fail."""
    for packet in islice(packets, most):
        with suppress(av.FFmpegError, OSError):
            for frame in stream.decode(packet):
                if not frame.is_corrupt:
                    return frame
    return None


def arbitrary_start_s(container: InputContainer) -> Fraction:
    """Returns the time at which the timestamps of a broadcast container start; 0 for other formats."""
    start = container.start_time if container.format.name in ARBITRARY_START_FORMATS else None
    return round(Fraction(start or 0, av.time_base) / TICK_90KHZ) * TICK_90KHZ


def side_data(frame: VideoFrame) -> dict[Type, SideData]:
    try:
        # Iterating over this mapping yields its values, not its keys.
        return {data.type: data for data in cast(Any, frame.side_data)}
    except ValueError:
        # PyAV raises for kinds of side data that it does not know.
        return {}


def packets(container: InputContainer, stream: VideoStream | None, name: str) -> Iterator[Packet]:
    """Yields the packets of one stream or of all streams. Raises RedlineError if the file cannot be read completely."""
    found = container.demux() if stream is None else container.demux(stream)
    while True:
        try:
            packet = next(found, None)
        except (av.FFmpegError, OSError) as error:
            raise RedlineError(f"cannot read {name!r} to its end: {reason(error)}.") from error
        if packet is None:
            return
        yield packet


def frame_rate(stream: VideoStream, path: Path) -> Fraction:
    """Returns the declared frame rate, or measures it from timestamps; 25 if neither is possible."""
    if (declared := declared_rate(stream)) is not None:
        return declared
    with opened(path) as container:
        timed = islice(packets(container, main_stream(container, path), path.name), _PACKETS_TIMED)
        times = [packet.pts for packet in timed if packet.pts is not None]
    if len(times) < 2 or not stream.time_base or max(times) == min(times):
        return Fraction(25)
    measured = (len(times) - 1) / ((max(times) - min(times)) * Fraction(stream.time_base))
    return min(measured, Fraction(_FASTEST)).limit_denominator(1001)


def declared_rate(stream: VideoStream) -> Fraction | None:
    """Returns the frame rate that the container declares, if it is plausible."""
    for rate in (stream.average_rate, stream.guessed_rate):
        if rate and 0 < rate <= _FASTEST:
            return Fraction(rate)
    return None


def reason(error: Exception) -> str:
    """Returns the message of a system or FFmpeg error without its number and file name."""
    return getattr(error, "strerror", None) or str(error)


def _why_not(path: Path, error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return f"{str(path)!r} does not exist."
    if isinstance(error, PermissionError | IsADirectoryError):
        return f"cannot read {str(path)!r}: {error.strerror}."
    if path.is_file() and path.stat().st_size == 0:
        return f"{path.name!r} is empty."
    if _is_playlist(path):
        return f"{path.name!r} is a playlist, which is not supported: give the video file itself."
    if isinstance(error, av.ArgumentError):  # FFmpeg's error for a format that is not in the whitelist
        return f"{path.name!r} has an unsupported format: give a video file, such as .mp4 or .mkv."
    return f"{path.name!r} is not a readable video, or it is truncated and its index is missing."


def _is_playlist(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        start = file.read(_PLAYLIST_BYTES).removeprefix(codecs.BOM_UTF8).lstrip()
    # An XML declaration and comments may come before the MPD element.
    return start.startswith(_PLAYLIST_STARTS) or (start.startswith(_XML_STARTS) and b"<MPD" in start)

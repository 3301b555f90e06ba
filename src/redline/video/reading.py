"""Opens films: the one place that asks PyAV what a file holds, and says in a sentence why it cannot be read."""

import codecs
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from itertools import islice
from pathlib import Path

import av
from av.container import InputContainer
from av.packet import Packet
from av.stream import Disposition
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from redline.errors import RedlineError
from redline.machine.cores import cores

_DAMAGED_START = 1000
_FASTEST, _PACKETS_TIMED = 240, 100
_DECODED_PER_THREAD, _CONVERTED_PER_THREAD, _MOST_THREADS = 2**17, 2**16, 16
# Decoders of pictures that are mostly one slice. The one of VP8 has threads for the rows of one, and only with these an
# error for some damage.
_ONE_SLICE = ("h264", "hevc", "mpeg4", "vp9")
_MOST_AT_ONCE = 6
# Demuxers that read one file only. Playlists (HLS, DASH, ffconcat, image sequences) open other files and addresses that
# they name, so a file from an untrusted source could pull in any local file.
_FORMATS = (
    "mov,matroska,avi,mpegts,mpeg,mpegvideo,flv,asf,ogg,nut,mxf,gxf,gif,apng,ivf,obu,av1,h261,h263,h264,hevc,vvc,m4v,"
    "mjpeg,vc1,cavsvideo,dirac,dnxhd,dv,yuv4mpegpipe,rm,nsv,nuv,wtv,swf,smk,bink,flic,roq,jpegxl_anim,webp,"
    "png_pipe,jpeg_pipe,webp_pipe,bmp_pipe,tiff_pipe,gif_pipe,ppm_pipe,jpegxl_pipe,j2k_pipe,exr_pipe,dpx_pipe"
)
_PLAYLIST_STARTS, _XML_STARTS, _PLAYLIST_BYTES = (b"#EXTM3U", b"ffconcat", b"<MPD"), (b"<?xml", b"<!--"), 4096
_ONE_FILE = {"protocol_whitelist": "file", "format_whitelist": _FORMATS}


@contextmanager
def opened(path: Path) -> Iterator[InputContainer]:
    """Opens a local video for reading and closes it. Raises RedlineError if it is not one."""
    with open_video(path) as container:
        yield container


def open_video(path: Path) -> InputContainer:
    """Opens a local video, and no other file that it may refer to. Raises RedlineError if it is not a video."""
    try:
        # "file:" keeps a name with a colon from being read as a protocol; tags need not be valid UTF-8 to be kept.
        return av.open(f"file:{path}", options=_ONE_FILE, metadata_errors="surrogateescape")
    except (av.FFmpegError, OSError) as error:
        raise RedlineError(_why_not(path, error)) from error


def main_stream(container: InputContainer, path: Path) -> VideoStream:
    """The stream of moving pictures that a player would show."""
    cover = Disposition.attached_pic | Disposition.timed_thumbnails
    moving = [stream for stream in container.streams.video if not stream.disposition & cover]
    if not moving:
        still = " but a cover picture" if container.streams.video else ""
        raise RedlineError(f"{path.name!r} has no video stream{still}.")
    best = container.streams.best("video")
    stream = next((stream for stream in moving if best is not None and stream.index == best.index), moving[0])
    if stream.codec_context is None:
        raise RedlineError(f"the pictures in {path.name!r} are in a form for which there is no decoder.")
    # A decoder that works on several pictures at once ends at a damaged one among the last, without a word, and what
    # follows is lost: whoever lets it (`enable_frame_threads`) has to look for that, and to read the film again.
    stream.thread_type = "SLICE"
    stream.codec_context.thread_count = _threads(stream.height * stream.width, _DECODED_PER_THREAD)
    return stream


def conversion_threads(pixels: int) -> int:
    """Threads that are worth waking to bring so many pixels to RGB: each has rows of its own."""
    return _threads(pixels, _CONVERTED_PER_THREAD)


def _threads(pixels: int, each: int) -> int:
    """Many for a small picture only make its time uneven."""
    return max(1, min(cores(), _MOST_THREADS, pixels // each))


def enable_frame_threads(stream: VideoStream) -> int:
    """Lets the decoder work on several pictures at a time, and says on how many: 1 where it does not."""
    context = stream.codec_context
    count = frame_threads()
    if count < 2 or context.name not in _ONE_SLICE:
        return 1
    stream.thread_type = "FRAME"
    context.thread_count = count
    # A picture that comes out reordered may have been handed on before its thread met the damage, and is then not
    # marked. An error comes in the order of packets, before any picture that it spoils.
    context.options = {**context.options, "err_detect": "explode"}
    return count


def frame_threads() -> int:
    """Half of the cores: whoever takes the pictures has work for the others."""
    return min(cores() // 2, _MOST_AT_ONCE)


def first_frame(container: InputContainer, stream: VideoStream, path: Path) -> VideoFrame:
    """A recording may start between two key frames, so that its first packets cannot be decoded."""
    for tries, packet in enumerate(packets(container, stream, path.name)):
        try:
            frames = packet.decode()
        except (av.FFmpegError, OSError):
            frames = []
        for frame in frames:
            if isinstance(frame, VideoFrame) and not frame.is_corrupt:
                return frame
        if tries > _DAMAGED_START:
            break
    raise RedlineError(f"no picture in {path.name!r} can be decoded.")


def packets(container: InputContainer, stream: VideoStream | None, name: str) -> Iterator[Packet]:
    """Those of one stream, or of all; a file that cannot be read on is one sentence."""
    found = container.demux() if stream is None else container.demux(stream)
    while True:
        try:
            packet = next(found, None)
        except (av.FFmpegError, OSError) as error:
            raise RedlineError(f"{name!r} cannot be read to its end: {reason(error)}.") from error
        if packet is None:
            return
        yield packet


def frame_rate(stream: VideoStream, path: Path) -> Fraction:
    """Pictures a second. A file that does not say so is given its clock's rate, which tells nothing."""
    if (said := declared_rate(stream)) is not None:
        return said
    with opened(path) as container:
        timed = islice(packets(container, main_stream(container, path), path.name), _PACKETS_TIMED)
        times = [packet.pts for packet in timed if packet.pts is not None]
    if len(times) < 2 or not stream.time_base or max(times) == min(times):
        return Fraction(25)
    measured = (len(times) - 1) / ((max(times) - min(times)) * Fraction(stream.time_base))
    return min(measured, Fraction(_FASTEST)).limit_denominator(1001)


def declared_rate(stream: VideoStream) -> Fraction | None:
    """What the container says, where that can be a rate."""
    for said in (stream.average_rate, stream.guessed_rate):
        if said and 0 < said <= _FASTEST:
            return Fraction(said)
    return None


def reason(error: Exception) -> str:
    """What the system or FFmpeg says of an error, without its number and file name."""
    return getattr(error, "strerror", None) or str(error)


def _why_not(path: Path, error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return f"{str(path)!r} does not exist."
    if isinstance(error, PermissionError | IsADirectoryError):
        return f"cannot read {str(path)!r}: {error.strerror}."
    if path.is_file() and path.stat().st_size == 0:
        return f"{path.name!r} is empty."
    if _is_playlist(path):
        return f"{path.name!r} is a playlist, and playlists are not opened: give the video file itself."
    if isinstance(error, av.ArgumentError):  # FFmpeg's error for a format that is not in the whitelist
        return f"{path.name!r} is in a format that is not read: give a video file, such as .mp4 or .mkv."
    return f"{path.name!r} is no film that can be read, or its end, with the index, is missing."


def _is_playlist(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        start = file.read(_PLAYLIST_BYTES).removeprefix(codecs.BOM_UTF8).lstrip()
    # An XML declaration and comments may come before the MPD element.
    return start.startswith(_PLAYLIST_STARTS) or (start.startswith(_XML_STARTS) and b"<MPD" in start)

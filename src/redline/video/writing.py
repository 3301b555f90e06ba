"""Opens video files and encoders for writing through PyAV."""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import av
from av.container import OutputContainer
from av.stream import Stream
from av.video.stream import VideoStream

from redline.errors import RedlineError

_FINEST_CLOCK = (1 << 31) - 1


def open_output(path: Path, container: str, clock: int = 1000, **options: str) -> OutputContainer:
    """Opens a file for writing. `clock` is the time scale of the MP4 header, in ticks per second."""
    if container in ("matroska", "webm"):
        # By default, FFmpeg shifts all timestamps if audio starts slightly before 0, as AAC from an MP4 file does.
        options["avoid_negative_ts"] = "disabled"
    else:
        options["movie_timescale"] = str(clock)
    return av.open(f"file:{path}", "w", format=container, container_options=options, metadata_errors="surrogateescape")


def exact_clock(rates: list[int], otherwise: int) -> int:
    """Returns a time scale in which ticks of all these rates are exact; `otherwise` if it would be too fine."""
    finest = math.lcm(1000, *rates)
    return finest if finest <= _FINEST_CLOCK else otherwise


def open_encoder(stream: VideoStream, options: dict[str, str]) -> None:
    """Opens the encoder of a stream. Raises RedlineError if it does not support the frames or these options."""
    context = stream.codec_context
    try:
        context.open()
    except (ValueError, av.FFmpegError) as error:
        size = f"{context.width}×{context.height}"
        raise RedlineError(f"{context.codec.name} cannot encode {size} frames with {options}.") from error


@contextmanager
def trial_output(container: str) -> Iterator[OutputContainer]:
    """Opens a container that discards its output, as a context manager."""
    trial = av.open(os.devnull, "w", format=container)
    try:
        yield trial
    finally:
        with suppress(ValueError, av.FFmpegError):
            trial.close()


def can_hold(container: str, stream: Stream) -> bool:
    """Tries to write a header with this stream, and returns whether that worked; not all limits are documented."""
    with suppress(ValueError, AttributeError, av.FFmpegError), trial_output(container) as trial:
        trial.add_stream_from_template(stream, opaque=True)
        trial.start_encoding()
        return True
    return False

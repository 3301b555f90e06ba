"""Opens the source and the output of a stream by the names that users give."""

import re
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

import torch

from redline.errors import RedlineError
from redline.stream.choices import STREAM_SINKS, STREAM_SOURCES, VIDEO_CONTAINERS
from redline.stream.frame_model import ModelControls
from redline.stream.latency import Latency
from redline.stream.settings import LiveSettings
from redline.stream.sinks import NullSink, Sink
from redline.stream.sinks.displays import VirtualCameraSink, WindowSink
from redline.stream.sinks.image_folder import ImageFolderSink
from redline.stream.sinks.mjpeg import PORT, MjpegSink
from redline.stream.sinks.video_file import VideoFileSink
from redline.stream.sources import Source
from redline.stream.sources.image_folder import ImageFolder
from redline.stream.sources.live_input import SCHEMES, CameraMode, LiveInput, open_network, open_webcam
from redline.stream.sources.synthetic import SyntheticClip
from redline.stream.sources.video_file import VideoFile
from redline.stream.sources.wrappers import Paced, Resized, SourceWrapper, check_size

_SYNTHETIC = re.compile(r"(?:(\d+)x(\d+))?(?:@(\d+(?:\.\d+)?))?(?:,(\d+(?:\.\d+)?))?")
_WEBCAM = re.compile(r"(?:(\d+)(?::|$))?(?:(\d+)x(\d+))?(?:@(\d+(?:\.\d+)?))?(?:,(\w+))?")
_FOLDER = re.compile(r"(.+)@(\d+(?:\.\d+)?)")
_BROWSER, _MJPEG = "browser", "mjpeg"
# Outputs that people watch while the stream runs. For these, a video file is played at its own frame rate.
_WATCHED = (_BROWSER, _MJPEG, "window", "virtual-camera")
_BROWSER_PORT, _BROWSER_SIZE = 8181, (512, 512)
_LOCAL = "127.0.0.1"
_WAITS = "the video starts when the page is opened; Ctrl-C ends the wait."


@dataclass(frozen=True)
class EndpointOptions:
    """Options of source and output, with the meaning that they have for `Stream`. `controls`, `device` and `busy_share`
    are shown on the page.

    `live` also skips damaged parts of a video, as `keep_going` does.
    """

    size: tuple[int, int] | None = None
    live: bool = False
    key: str | None = None
    certificate: Path | None = None
    keep_going: bool = False
    controls: ModelControls = ModelControls()
    device: torch.device = torch.device("cpu")
    busy_share: Callable[[], float | None] = lambda: None


@dataclass
class Endpoints:
    """An open source and sink.

    `urls` are the addresses for viewers, and `notes` messages to log before the stream starts. `close` ends the page,
    which stays open after source and sink have ended.
    """

    source: Source
    sink: Sink
    urls: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    close: Callable[[], None] = lambda: None


def serves_viewers(source: str, sink: str) -> bool:
    """Returns whether source or output is a server that viewers can open."""
    return _BROWSER in (_word(source), _word(sink)) or _word(sink) == _MJPEG


def open_endpoints(
    source: str, sink: str, options: EndpointOptions, settings: LiveSettings, latency: Latency
) -> Endpoints:
    """Opens source and output. If both are `browser`, they share one page."""
    options = replace(options, live=options.live or _word(sink) in _WATCHED)
    if _BROWSER in (_word(source), _word(sink)):
        return _open_with_browser(source, sink, options, settings, latency)
    if options.certificate is not None:
        raise RedlineError("--certificate needs a browser as source or output, and this stream has none.")
    if options.key is not None and _word(sink) != _MJPEG:
        raise RedlineError("--key needs an output that serves viewers, and this stream has none.")
    with ExitStack() as on_error:
        opened = open_source(source, options, latency.drop)
        on_error.callback(opened.close)
        target = open_sink(sink, opened, options)
        on_error.pop_all()
    return Endpoints(opened, target, target.urls if isinstance(target, MjpegSink) else (), _notes(opened, target))


def open_source(
    text: str, options: EndpointOptions | None = None, drop: Callable[[str], None] = lambda cause: None
) -> Source:
    """Opens any source except a browser. `drop` is called for each frame that is skipped as late or damaged."""
    options = options or EndpointOptions()
    if options.size is not None:
        check_size(*options.size)
    source = _named_source(text, options, drop)
    if options.live and not source.is_live:
        source = Paced(source, drop=drop)
    return source if options.size is None else Resized(source, *options.size)


def open_sink(text: str, source: Source, options: EndpointOptions | None = None) -> Sink:
    """Opens any output except a browser. An output video gets the source's audio if the source is a video file."""
    options, (word, _, rest) = options or EndpointOptions(), text.partition(":")
    if text == "null":
        return NullSink()
    if text == "window":
        return WindowSink()
    if word == _MJPEG:
        return MjpegSink(*_host_and_port(text, PORT), options.key)
    if word == "virtual-camera":
        return VirtualCameraSink(source.rate, rest or None)
    path = Path(text)
    if path.suffix.lower() in VIDEO_CONTAINERS:
        return _video_file(path, source)
    if text and (text.endswith(("/", "\\")) or path.is_dir()):
        return ImageFolderSink(path)
    raise RedlineError(f"unknown output {text!r}; use one of: {STREAM_SINKS}.")


def _word(text: str) -> str:
    return text.partition(":")[0]


def _named_source(text: str, options: EndpointOptions, drop: Callable[[str], None]) -> Source:
    (word, _, rest), size = text.partition(":"), options.size
    if word == "webcam":
        return _webcam(text, rest, drop, size)
    if text.startswith("/dev/video"):
        return open_webcam(text, drop=drop, size=size)
    if word == "synthetic":
        return _synthetic(text, rest)
    if word.lower() in SCHEMES and rest.startswith("//"):
        return open_network(f"{word.lower()}:{rest}", drop=drop, size=size)
    path = Path(text)
    if text and path.is_dir():
        return ImageFolder(path)
    if (found := _FOLDER.fullmatch(text)) is not None and Path(found[1]).is_dir():
        return ImageFolder(Path(found[1]), Fraction(found[2]))
    if text and (path.exists() or path.suffix):
        keep_going = options.keep_going or options.live
        return VideoFile(path, drop=drop if keep_going else None, size=size, frame_threads=not options.live)
    raise RedlineError(f"unknown source {text!r}; use one of: {STREAM_SOURCES}.")


def _webcam(text: str, rest: str, drop: Callable[[str], None], size: tuple[int, int] | None) -> LiveInput:
    found = _WEBCAM.fullmatch(rest)
    if found is None:
        raise RedlineError(f"invalid camera {text!r}: write its number, as in webcam:1 or webcam:1:1280x720@30.")
    sent_size = None if found[2] is None else (int(found[3]), int(found[2]))
    rate = None if found[4] is None else Fraction(found[4])
    if 0 in (sent_size or ()) or rate == 0:
        raise RedlineError(f"invalid camera {text!r}: size and frame rate must be above 0.")
    return open_webcam(int(found[1] or 0), mode=CameraMode(sent_size, rate, found[5]), drop=drop, size=size)


def _synthetic(text: str, rest: str) -> SyntheticClip:
    found = _SYNTHETIC.fullmatch(rest)
    if found is None:
        raise RedlineError(f"invalid test clip {text!r}: write synthetic:WIDTHxHEIGHT@FPS,SECONDS, or parts of it.")
    width, height, rate = int(found[1] or 256), int(found[2] or 256), Fraction(found[3] or 25)
    if found[4] is not None and not Fraction(found[4]):
        raise RedlineError(f"invalid test clip {text!r}: its duration must be above 0.")
    count = None if found[4] is None else max(1, round(Fraction(found[4]) * rate))
    return SyntheticClip(height, width, count, rate)


def _video_file(path: Path, source: Source) -> VideoFileSink:
    video = _innermost(source)
    if not isinstance(video, VideoFile):
        return VideoFileSink(path, source.rate, origin_s=None, is_live=source.is_live)
    if path.exists() and path.samefile(video.path):
        raise RedlineError(f"cannot write {str(path)!r}: it is the source.")
    audio = video.path if video.has_audio else None
    return VideoFileSink(path, source.rate, origin_s=video.origin_s, audio=audio, is_live=source.is_live)


def _notes(source: Source, sink: Sink) -> tuple[str, ...]:
    inner = _innermost(source)
    notes = sink.notes if isinstance(sink, VideoFileSink) else ()
    if isinstance(inner, (VideoFile, LiveInput)):
        notes = (*notes, *inner.notes)
    if isinstance(sink, VideoFileSink) and isinstance(inner, LiveInput) and inner.has_audio:
        notes = (*notes, f"the audio of {inner.name} is not recorded: only local video files keep their audio.")
    return notes


def _innermost(source: Source) -> Source:
    while isinstance(source, SourceWrapper):
        source = source.inner
    return source


def _is_paced(source: Source) -> bool:
    return isinstance(source.inner if isinstance(source, Resized) else source, Paced)


def _host_and_port(text: str, default: int) -> tuple[str, int]:
    word, _, address = text.partition(":")
    host, _, port = address.rpartition(":")
    if port and not port.isdecimal():
        raise RedlineError(f"invalid port {address!r}: write a port as in {word}:{default} or {word}:HOST:PORT.")
    return host.strip("[]") or _LOCAL, int(port or default)


def _open_with_browser(
    source: str, sink: str, options: EndpointOptions, settings: LiveSettings, latency: Latency
) -> Endpoints:
    # Imported here because the page needs optional packages.
    from redline.stream.browser import serve

    as_source, as_sink = _word(source) == _BROWSER, _word(sink) == _BROWSER
    named = {text for text in (source, sink) if _word(text) == _BROWSER and text != _BROWSER}
    if len(named) > 1:
        raise RedlineError(
            f"source {source!r} and output {sink!r} must be the same browser page: give the same address for both."
        )
    host, port = _host_and_port(named.pop() if named else _BROWSER, _BROWSER_PORT)
    opened = None if as_source else open_source(source, options, latency.drop)
    with ExitStack() as on_error:
        if opened is not None:
            on_error.callback(opened.close)
        page = serve(
            host,
            port,
            options.key,
            as_source=as_source,
            as_sink=as_sink,
            settings=settings,
            latency=latency,
            size=options.size or _BROWSER_SIZE,
            controls=options.controls,
            device=options.device,
            busy_share=options.busy_share,
            certificate=options.certificate,
        )
        on_error.callback(page.close)
        # A video file starts when the first viewer connects; a camera starts at once.
        waits = opened is not None and _is_paced(opened)
        shown = page.source if opened is None else page.preview(opened, waits)
        assert shown is not None
        target = page.sink if as_sink else open_sink(sink, shown, options)
        assert target is not None
        on_error.pop_all()
    urls = (*page.urls, *(target.urls if isinstance(target, MjpegSink) else ()))
    notes = (*_notes(shown if opened is None else opened, target), *((_WAITS,) if waits else ()))
    return Endpoints(shown, target, urls, notes, page.close)

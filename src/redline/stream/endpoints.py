"""Where a stream comes from and goes to, as people write it: the one place that knows the words."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path

import torch

from redline.choices import STREAM_SINKS, STREAM_SOURCES, VIDEO_CONTAINERS
from redline.errors import RedlineError
from redline.stream.latency import Latency
from redline.stream.settings import LiveSettings
from redline.stream.sinks import Sink
from redline.stream.sinks.image_folder import ImageFolderSink
from redline.stream.sinks.mjpeg import PORT, MjpegSink
from redline.stream.sinks.null import NullSink
from redline.stream.sinks.video_file import VideoFileSink
from redline.stream.sinks.virtual_camera import VirtualCameraSink
from redline.stream.sinks.window import WindowSink
from redline.stream.sources import Source
from redline.stream.sources.image_folder import ImageFolder
from redline.stream.sources.live_input import LiveInput
from redline.stream.sources.network import SCHEMES, open_network
from redline.stream.sources.paced import Paced
from redline.stream.sources.resized import Resized, check_size
from redline.stream.sources.synthetic import SyntheticClip
from redline.stream.sources.video_file import VideoFile
from redline.stream.sources.webcam import CameraMode, open_webcam

_SYNTHETIC = re.compile(r"(?:(\d+)x(\d+))?(?:@(\d+(?:\.\d+)?))?(?:,(\d+(?:\.\d+)?))?")
_WEBCAM = re.compile(r"(?:(\d+)(?::|$))?(?:(\d+)x(\d+))?(?:@(\d+(?:\.\d+)?))?(?:,(\w+))?")
_FOLDER = re.compile(r"(.+)@(\d+(?:\.\d+)?)")
_BROWSER, _MJPEG = "browser", "mjpeg"
# Where somebody looks while it runs: a film goes there at its own pace.
_SHOWN = (_BROWSER, _MJPEG, "window", "virtual-camera")
_BROWSER_PORT, _BROWSER_SIZE = 8181, (512, 512)
_LOCAL = "127.0.0.1"
_WAITS = "it begins when the page is opened; Ctrl-C ends the wait."


@dataclass(frozen=True)
class EndpointOptions:
    """What goes for whichever place was named. `size` is (height, width); `live` has a file come at its own pace, as
    from a camera; `key` is what viewers on other machines must know, and `certificate` makes a page https; `keep_going`
    leaves out what is damaged in a film, as `live` does. The rest is for a page: sliders and figures."""

    size: tuple[int, int] | None = None
    live: bool = False
    key: str | None = None
    certificate: Path | None = None
    keep_going: bool = False
    most_steps: int = 8
    control_names: tuple[str, ...] = ()
    control_least: float = -1.0
    takes_prompt: bool = False
    device: torch.device = torch.device("cpu")
    busy_share: Callable[[], float | None] = lambda: None


@dataclass
class Endpoints:
    """`addresses` are what a person opens to look, and `notes` sentences to be told before it starts; `close` ends what
    outlives source and sink."""

    source: Source
    sink: Sink
    addresses: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    close: Callable[[], None] = field(default=lambda: None)


def serves_viewers(source: str, sink: str) -> bool:
    """Returns whether a stream between these places is seen over the network."""
    words = {text.partition(":")[0] for text in (source, sink)}
    return _BROWSER in words or sink.partition(":")[0] == _MJPEG


def open_endpoints(
    source: str, sink: str, wishes: EndpointOptions, settings: LiveSettings, latency: Latency
) -> Endpoints:
    """Both ends; where one of them is a browser, they share its page."""
    words = [text.partition(":")[0] for text in (source, sink)]
    wishes = replace(wishes, live=wishes.live or words[1] in _SHOWN)
    if _BROWSER not in words:
        if wishes.certificate is not None:
            raise RedlineError("a certificate is for the page of a browser, and this stream has none.")
        if wishes.key is not None and words[1] != _MJPEG:
            raise RedlineError("a key is for viewers on other machines, and this stream serves none.")
        came = open_source(source, wishes, latency.drop)
        try:
            goes = open_sink(sink, came, wishes)
        except BaseException:
            came.close()
            raise
        return Endpoints(came, goes, goes.urls if isinstance(goes, MjpegSink) else (), _notes(came, goes))
    return _open_with_browser(source, sink, words, wishes, settings, latency)


def open_source(
    text: str, wishes: EndpointOptions | None = None, drop: Callable[[str], None] = lambda cause: None
) -> Source:
    """Any but a browser. `drop` is told of frames that are left out, since they are late or damaged."""
    wishes = wishes or EndpointOptions()
    if wishes.size is not None:
        check_size(*wishes.size)
    source = _named_source(text, wishes, drop)
    if wishes.live and not source.is_live:
        source = Paced(source, drop=drop)
    return source if wishes.size is None else Resized(source, *wishes.size)


def open_sink(text: str, source: Source, wishes: EndpointOptions | None = None) -> Sink:
    """Any but a browser. A film takes the sound of the film that the source is."""
    wishes, (word, _, rest) = wishes or EndpointOptions(), text.partition(":")
    if text == "null":
        return NullSink()
    if text == "window":
        return WindowSink()
    if word == _MJPEG:
        return MjpegSink(*_host_and_port(text, PORT), wishes.key)
    if word == "virtual-camera":
        return VirtualCameraSink(source.rate, rest or None)
    path = Path(text)
    if path.suffix.lower() in VIDEO_CONTAINERS:
        return _film(path, source)
    if text and (text.endswith(("/", "\\")) or path.is_dir()):
        return ImageFolderSink(path)
    raise RedlineError(f"{text!r} is no place for a stream to go to: it is {STREAM_SINKS}.")


def _named_source(text: str, wishes: EndpointOptions, drop: Callable[[str], None]) -> Source:
    (word, _, rest), size = text.partition(":"), wishes.size
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
        keep_going = wishes.keep_going or wishes.live
        return VideoFile(path, drop=drop if keep_going else None, size=size, ahead=not wishes.live)
    raise RedlineError(f"{text!r} is no source of a stream: it is {STREAM_SOURCES}.")


def _webcam(text: str, rest: str, drop: Callable[[str], None], size: tuple[int, int] | None) -> LiveInput:
    found = _WEBCAM.fullmatch(rest)
    if found is None:
        raise RedlineError(f"a camera is named by its number, as in webcam:1 or webcam:1:1280x720@30, not {text!r}.")
    taken = None if found[2] is None else (int(found[3]), int(found[2]))
    rate = None if found[4] is None else Fraction(found[4])
    if 0 in (taken or ()) or rate == 0:
        raise RedlineError(f"a camera gives pictures of some size, some a second, not {text!r}.")
    return open_webcam(int(found[1] or 0), asked=CameraMode(taken, rate, found[5]), drop=drop, size=size)


def _synthetic(text: str, rest: str) -> SyntheticClip:
    found = _SYNTHETIC.fullmatch(rest)
    if found is None:
        raise RedlineError(f"{text!r} is no test clip: write synthetic:WIDTHxHEIGHT@FPS,SECONDS, or parts of it.")
    width, height, rate = int(found[1] or 256), int(found[2] or 256), Fraction(found[3] or 25)
    if found[4] is not None and not Fraction(found[4]):
        raise RedlineError(f"a test clip lasts for some time, and {text!r} for none.")
    count = None if found[4] is None else max(1, round(Fraction(found[4]) * rate))
    return SyntheticClip(height, width, count, rate)


def _film(path: Path, source: Source) -> VideoFileSink:
    film = _innermost(source)
    if not isinstance(film, VideoFile):
        return VideoFileSink(path, source.rate, origin_s=None, is_live=source.is_live)
    if path.exists() and path.samefile(film.path):
        raise RedlineError(f"{str(path)!r} would be written over the film that it is made of.")
    sound = film.path if film.has_audio else None
    return VideoFileSink(path, source.rate, origin_s=film.origin_s, sound=sound, is_live=source.is_live)


def _notes(source: Source, sink: Sink) -> tuple[str, ...]:
    """What the user is told of source and sink before the stream starts."""
    inner = _innermost(source)
    notes = sink.notes if isinstance(sink, VideoFileSink) else ()
    if isinstance(inner, (VideoFile, LiveInput)):
        notes = (*notes, *inner.notes)
    if isinstance(sink, VideoFileSink) and isinstance(inner, LiveInput) and inner.has_audio:
        notes = (*notes, f"the sound of {inner.name} is not recorded: only that of a film on this disk is.")
    return notes


def _innermost(source: Source) -> Source:
    """Under whatever changes its pace or size."""
    while isinstance(source, (Paced, Resized)):
        source = source.inner
    return source


def _is_paced(source: Source) -> bool:
    return isinstance(source.inner if isinstance(source, Resized) else source, Paced)


def _host_and_port(text: str, usual: int) -> tuple[str, int]:
    word, _, place = text.partition(":")
    host, _, port = place.rpartition(":")
    if port and not port.isdecimal():
        raise RedlineError(f"{place!r} is no port: write one, as in {word}:{usual}, or {word}:HOST:PORT.")
    return host.strip("[]") or _LOCAL, int(port or usual)


def _open_with_browser(
    source: str, sink: str, words: list[str], wishes: EndpointOptions, settings: LiveSettings, latency: Latency
) -> Endpoints:
    # Here alone: the page needs libraries that nothing else does.
    from redline.stream.browser import serve

    as_source, as_sink = (word == _BROWSER for word in words)
    named = {text for text, word in zip((source, sink), words, strict=True) if word == _BROWSER and text != _BROWSER}
    if len(named) > 1:
        raise RedlineError(f"a browser sends and sees on one page, and {source!r} and {sink!r} are two: name one.")
    host, port = _host_and_port(named.pop() if named else _BROWSER, _BROWSER_PORT)
    came = None if as_source else open_source(source, wishes, latency.drop)
    page = None
    try:
        page = serve(
            host,
            port,
            wishes.key,
            as_source=as_source,
            as_sink=as_sink,
            settings=settings,
            latency=latency,
            size=wishes.size or _BROWSER_SIZE,
            most_steps=wishes.most_steps,
            control_names=wishes.control_names,
            control_least=wishes.control_least,
            takes_prompt=wishes.takes_prompt,
            device=wishes.device,
            busy_share=wishes.busy_share,
            certificate=wishes.certificate,
        )
        # A film does not play to an empty room; a camera does not wait.
        waits = came is not None and _is_paced(came)
        shown = page.source if came is None else page.tap(came, waits)
        assert shown is not None
        goes = page.sink if as_sink else open_sink(sink, shown, wishes)
        assert goes is not None
    except BaseException:
        if page is not None:
            page.close()
        if came is not None:
            came.close()
        raise
    addresses = (*page.urls, *(goes.urls if isinstance(goes, MjpegSink) else ()))
    notes = (*_notes(shown if came is None else came, goes), *((_WAITS,) if waits else ()))
    return Endpoints(shown, goes, addresses, notes, page.close)

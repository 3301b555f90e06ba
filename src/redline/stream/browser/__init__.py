"""The browser's end of a stream: a local page that shows input and output, changes settings and draws the figures, and
is the stream's source, its sink, or both, over WebRTC.

Importing this needs neither aiortc nor aiohttp; `serve` does, and says so.
"""

import socket
import ssl
from collections.abc import Callable, Sequence
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from redline.errors import RedlineError
from redline.stream.access import Access, urls
from redline.stream.clock import Clock, SystemClock
from redline.stream.latency import Latency
from redline.stream.settings import LiveSettings
from redline.stream.sinks import Sink
from redline.stream.sources import Source

if TYPE_CHECKING:
    from redline.stream.browser.broadcast import Broadcast
    from redline.stream.browser.server import PageServer

_NEEDED = ("aiortc", "aiohttp")


class Page:
    """A page that is being served. `urls` are its addresses, of which `url` is the first; `source` and `sink` are there
    where they were asked for."""

    def __init__(
        self,
        urls: tuple[str, ...],
        site: "PageServer",
        source: Source | None,
        sink: Sink | None,
        outlets: "dict[str, Broadcast]",
    ) -> None:
        self.urls, self.url, self.source, self.sink = urls, urls[0], source, sink
        self._site, self._outlets = site, outlets

    def tap(self, source: Source, waits: bool = False) -> Source:
        """The same source, whose frames are shown on the page as its input besides; where it `waits`, the first comes
        when somebody looks."""
        from redline.stream.browser.source import Previewed

        return Previewed(source, self._outlets["input"].put, self._outlets["output"].wanted if waits else None)

    def close(self) -> None:
        """Ends the page for all who look at it; to be called when the stream has ended."""
        if self.source is not None:
            self.source.close()
        self._site.close()


def serve(
    host: str = "127.0.0.1",
    port: int = 8181,
    key: str | None = None,
    *,
    as_source: bool,
    as_sink: bool,
    settings: LiveSettings,
    latency: Latency,
    size: tuple[int, int] = (512, 512),
    rate: Fraction = Fraction(30),
    most_steps: int = 8,
    control_names: Sequence[str] = (),
    control_least: float = -1.0,
    takes_prompt: bool = False,
    device: torch.device | str = "cpu",
    busy_share: Callable[[], float | None] = lambda: None,
    names: Sequence[str] = (),
    certificate: Path | None = None,
    clock: Clock | None = None,
) -> Page:
    """`size` is (height, width) of the frames that a browser as source gives, and `rate` what its camera is asked for.

    The first numbers of the control vector may have names, and then sliders from `control_least` to 1.
    The page shows the memory of `device`, and `busy_share`, how much of its time that works. Port 0 takes a free one.
    `names` are host names besides this machine's own under which the page may be opened;
    `certificate` is a PEM file with a key and certificates, for https.
    """
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        needs = " and ".join(missing)
        raise RedlineError(f"a browser is served with {needs}, which is not installed: pip install 'redline[browser]'.")
    if not as_source and not as_sink:
        raise RedlineError("a browser is the source of a stream, its sink, or both.")
    from redline.stream.browser.broadcast import Broadcast
    from redline.stream.browser.metrics import figures
    from redline.stream.browser.server import PageServer
    from redline.stream.browser.sink import BrowserSink
    from redline.stream.browser.source import BrowserSource

    access = Access(host, key, tuple(names))
    clock = clock or SystemClock()
    outlets = {"input": Broadcast(clock)} | ({"output": Broadcast(clock)} if as_sink else {})
    height, width = size
    source = BrowserSource("browser", height, width, rate, latency, clock, outlets["input"].put) if as_source else None
    sink = BrowserSink("browser", outlets["output"]) if as_sink else None
    control, named = settings.now().control, len(control_names)
    if named > len(control):
        raise RedlineError(f"{named} names do not fit a control vector of {len(control)} numbers.")
    unnamed = [f"Control {number}" for number in range(named + 1, len(control) + 1)]
    about = {
        "source": as_source,
        "sink": as_sink,
        "height": height,
        "width": width,
        "rate": float(rate),
        "most_steps": most_steps,
        "takes_prompt": takes_prompt,
        "device": torch.device(device).type,
        "control_names": [*control_names, *unnamed],
        "control_least": [control_least] * named + [-1.0] * len(unnamed),
    }
    tls = _tls(certificate)
    listener = _listen(host, port)

    def measure() -> dict[str, Any]:
        return figures(latency, outlets, clock.now_s(), torch.device(device), busy_share())

    site = PageServer(access, listener, tls, source, outlets, settings, measure, about)
    try:
        site.start()
    except BaseException:
        listener.close()
        raise
    scheme, bound_port = "http" if tls is None else "https", listener.getsockname()[1]
    return Page(urls(scheme, host, bound_port, "/", key), site, source, sink, outlets)


def _listen(host: str, port: int) -> socket.socket:
    if not 0 <= port < 65_536:
        raise RedlineError(f"a port is a number from 0 to 65535, not {port}.")
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        raise RedlineError(f"{host}:{port} cannot be listened on: {error.strerror or error}.") from error


def _tls(certificate: Path | None) -> ssl.SSLContext | None:
    if certificate is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certificate)
    except (OSError, ssl.SSLError) as error:
        raise RedlineError(f"{str(certificate)!r} is no PEM file with a key and its certificate: {error}.") from error
    return context


__all__ = ["Page", "serve"]

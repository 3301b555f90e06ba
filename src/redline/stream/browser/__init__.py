"""The browser as source and output: serves a local page that shows input and output, changes settings and plots
metrics.

Frames are sent over WebRTC. aiortc and aiohttp are needed for `serve`, but not for importing this package.
"""

import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from redline.errors import RedlineError
from redline.stream.frame_model import ModelControls
from redline.stream.frames import Clock
from redline.stream.latency import Latency
from redline.stream.settings import LiveSettings
from redline.stream.sinks import Sink
from redline.stream.sources import Source
from redline.stream.sources.wrappers import Previewed
from redline.web.access import Access, listen, urls

if TYPE_CHECKING:
    from redline.stream.browser.broadcast import Broadcast
    from redline.stream.browser.server import PageServer

_REQUIRED = ("aiortc", "aiohttp")


@dataclass(frozen=True)
class Page:
    """A page that is being served at `urls`. `source` and `sink` are None if they were not requested."""

    urls: tuple[str, ...]
    source: Source | None
    sink: Sink | None
    _server: "PageServer"
    _broadcasts: "dict[str, Broadcast]"

    @property
    def url(self) -> str:
        return self.urls[0]

    def preview(self, source: Source, waits: bool = False) -> Source:
        """Returns a source that also shows its frames on the page. If `waits`, it starts when a viewer connects."""
        begin = self._broadcasts["output"].wanted if waits else None
        return Previewed(source, self._broadcasts["input"].publish, begin)

    def close(self) -> None:
        """Ends the page for all viewers; call it when the stream has ended."""
        if self.source is not None:
            self.source.close()
        self._server.web.close()


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
    controls: ModelControls | None = None,
    device: torch.device | str = "cpu",
    busy_share: Callable[[], float | None] = lambda: None,
    names: Sequence[str] = (),
    certificate: Path | None = None,
    clock: Clock | None = None,
) -> Page:
    """Serves the page until `Page.close`.

    Args:
        port: the TCP port; 0 selects a free port.
        size: (height, width) of the frames if the browser is the source.
        rate: the frame rate requested from the browser's camera.
        controls: the settings that the model supports, shown as sliders.
        device: the device whose memory the page shows; `busy_share` returns its utilization.
        names: further host names under which the page may be opened, such as that of a proxy.
        certificate: a PEM file with a key and certificates, for https.
    """
    if missing := [name for name in _REQUIRED if find_spec(name) is None]:
        raise RedlineError(f"browser needs {' and '.join(missing)}: pip install 'redline[browser]'.")
    if not as_source and not as_sink:
        raise RedlineError("a page must be the source of a stream, its output, or both.")
    from redline.stream.browser.broadcast import Broadcast, BrowserSink
    from redline.stream.browser.server import PageServer, collect_metrics
    from redline.stream.browser.source import BrowserSource

    access = Access(host, key, tuple(names))
    clock = clock or Clock()
    broadcasts = {"input": Broadcast(clock)} | ({"output": Broadcast(clock)} if as_sink else {})
    height, width = size
    preview = broadcasts["input"].publish
    source = BrowserSource(height, width, rate, latency, clock, preview) if as_source else None
    sink = BrowserSink(broadcasts["output"]) if as_sink else None
    controls = controls or ModelControls()
    entries, named = len(settings.now().control), len(controls.names)
    if named > entries:
        raise RedlineError(f"there are {named} control names, but the control vector has {entries} numbers.")
    unnamed = tuple(f"Control {number}" for number in range(named + 1, entries + 1))
    info = {
        "source": as_source,
        "sink": as_sink,
        "height": height,
        "width": width,
        "rate": float(rate),
        "most_steps": controls.max_steps,
        "takes_prompt": controls.takes_prompt,
        "device": torch.device(device).type,
        "control_names": (*controls.names, *unnamed),
        "control_least": (controls.minimum,) * named + (-1.0,) * len(unnamed),
    }
    tls = _tls(certificate)
    listener = listen(host, port)

    def measure() -> dict[str, Any]:
        return collect_metrics(latency, broadcasts, clock.now_s(), torch.device(device), busy_share())

    server = PageServer(access, listener, tls, source, broadcasts, settings, measure, info)
    server.web.start()
    scheme, bound_port = "http" if tls is None else "https", listener.getsockname()[1]
    return Page(urls(scheme, host, bound_port, "/", key), source, sink, server, broadcasts)


def _tls(certificate: Path | None) -> ssl.SSLContext | None:
    if certificate is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certificate)
    except (OSError, ssl.SSLError) as error:
        text = f"{str(certificate)!r} is not a PEM file with a key and its certificate: {error}."
        raise RedlineError(text) from error
    return context

"""A stream from the network: a camera's RTSP, an MJPEG or HLS address, a film on a server."""

from collections.abc import Callable
from urllib.parse import urlsplit

from redline.errors import RedlineError
from redline.stream.clock import Clock
from redline.stream.sources import Source
from redline.stream.sources.live_input import Address, LiveInput
from redline.stream.sources.paced import Paced

SCHEMES = ("rtsp", "rtsps", "http", "https", "rtmp", "srt", "udp")
# A playlist from the network may name further addresses, and no local files.
_PROTOCOLS = "crypto,data,http,https,httpproxy,rtmp,rtmps,rtmpt,rtp,srtp,srt,tcp,tls,udp"
# Over UDP a lost packet smears the picture until the next key frame.
_RTSP = {"rtsp_transport": "tcp"}


def open_network(
    url: str,
    clock: Clock | None = None,
    open_s: float = 10.0,
    read_s: float = 5.0,
    drop: Callable[[str], None] = lambda cause: None,
    size: tuple[int, int] | None = None,
) -> Source:
    """A film of a known length comes at its own pace, whatever the network's is; `drop` is told of what is left out.
    Pictures are brought to `size`."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise RedlineError(f"{url!r} is no address: {error}.") from error
    if parts.scheme not in SCHEMES or not host:
        raise RedlineError(f"{url!r} is no address of a stream: it begins with one of {', '.join(SCHEMES)} and a host.")
    options = {"protocol_whitelist": _PROTOCOLS, **(_RTSP if parts.scheme.startswith("rtsp") else {})}
    # Names and passwords are part of some addresses, and of no sentence.
    name = f"{parts.scheme}://{host}{f':{port}' if port else ''}{parts.path}"
    source = LiveInput(Address(url, repr(name), None, options, open_s, read_s, is_live=True), clock, drop, size)
    return source if source.length_s is None else Paced(source, clock, drop)

"""Opens a stream from the network: an RTSP camera, an MJPEG or HLS address, a video on a server."""

from collections.abc import Callable
from urllib.parse import urlsplit

from redline.errors import RedlineError
from redline.stream.clock import Clock
from redline.stream.sources import Source
from redline.stream.sources.live_input import Address, LiveInput
from redline.stream.sources.paced import Paced

SCHEMES = ("rtsp", "rtsps", "http", "https", "rtmp", "srt", "udp")
# A playlist from the network may refer to other addresses, but not to local files.
_PROTOCOLS = "crypto,data,http,https,httpproxy,rtmp,rtmps,rtmpt,rtp,srtp,srt,tcp,tls,udp"
# Over UDP a lost packet would spoil all frames until the next key frame.
_RTSP = {"rtsp_transport": "tcp"}


def open_network(
    url: str,
    clock: Clock | None = None,
    open_s: float = 10.0,
    read_s: float = 5.0,
    drop: Callable[[str], None] = lambda cause: None,
    size: tuple[int, int] | None = None,
) -> Source:
    """Returns the source. A video of known length is paced.

    `drop` is called for each skipped frame. Frames are scaled to `size`.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise RedlineError(f"invalid address {url!r}: {error}.") from error
    if parts.scheme not in SCHEMES or not host:
        raise RedlineError(f"invalid address {url!r}: it must start with one of {', '.join(SCHEMES)}, and name a host.")
    options = {"protocol_whitelist": _PROTOCOLS, **(_RTSP if parts.scheme.startswith("rtsp") else {})}
    # Messages must not show user names and passwords of addresses.
    name = f"{parts.scheme}://{host}{f':{port}' if port else ''}{parts.path}"
    source = LiveInput(Address(url, repr(name), None, options, open_s, read_s, is_live=True), clock, drop, size)
    return source if source.length_s is None else Paced(source, clock, drop)

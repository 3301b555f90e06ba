"""Controls access to the web servers: compares keys in constant time, and checks the Host and Origin headers.

Any web site can make a browser send requests to 127.0.0.1. Therefore the Host header must name this machine, which
prevents DNS rebinding, and a WebSocket is opened only for the origin that served the page. A server that other
machines can reach requires a key as well.
"""

import errno
import hmac
import ipaddress
import secrets
import socket
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import quote, urlsplit

from redline.errors import RedlineError

SHORTEST_KEY = 12
_ANY = {
    "0.0.0.0": (socket.AF_INET, "192.0.2.1", "127.0.0.1"),
    "": (socket.AF_INET, "192.0.2.1", "127.0.0.1"),
    "::": (socket.AF_INET6, "2001:db8::1", "::1"),
}


def is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    address = _address(host)
    return address is not None and address.is_loopback


def urls(scheme: str, host: str, port: int, path: str, key: str | None) -> tuple[str, ...]:
    """Returns the URLs of a server that listens on this host. They contain the key if there is one."""
    query = f"?key={quote(key, safe='')}" if key is not None else ""
    hosts = (f"[{shown}]" if ":" in shown else shown for shown in reachable_hosts(host))
    return tuple(f"{scheme}://{shown}:{port}{path}{query}" for shown in hosts)


def reachable_hosts(host: str) -> tuple[str, ...]:
    """Returns (host,), or this machine's network addresses if `host` is a wildcard such as 0.0.0.0."""
    if host not in _ANY:
        return (host,)
    family, elsewhere, loopback = _ANY[host]
    found = list[str]()
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        # Connecting a UDP socket sends nothing: it only selects the local address. The remote address is reserved for
        # documentation.
        probe.connect((elsewhere, 9))
        found.append(probe.getsockname()[0])
    with suppress(OSError):
        found += [str(entry[4][0]) for entry in socket.getaddrinfo(socket.gethostname(), None, family)]
    usable = [shown for shown in found if (known := _address(shown)) and not known.is_loopback | known.is_link_local]
    return tuple(dict.fromkeys(usable)) or (loopback,)


def listen(host: str, port: int, backlog: int = 128) -> socket.socket:
    """Opens a socket that listens on the host and port. Port 0 selects a free port."""
    if not 0 <= port < 65_536:
        raise RedlineError(f"invalid port {port}: it must be from 0 to 65535.")
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, *_, address = found[0]
        return socket.create_server(address[:2], family=family, backlog=backlog)
    except OSError as error:
        why = error.strerror or str(error)
        if error.errno == errno.EADDRINUSE:
            why = "the port is in use: choose another one, or 0 for any free one"
        raise RedlineError(f"cannot listen on {host}:{port}: {why}.") from error


@dataclass(frozen=True)
class Access:
    """Checks requests. `names` are additional allowed host names, such as that of a proxy in front of the server.

    `token` is the value of the cookie that replaces the key, so that the key does not stay in the address bar.
    """

    host: str
    key: str | None = field(default=None, repr=False)
    names: tuple[str, ...] = ()
    token: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)

    def __post_init__(self) -> None:
        if self.key is None and not is_loopback(self.host):
            raise RedlineError(
                f"{self.host!r} can be reached from other machines: give a --key, a --key-file or REDLINE_KEY, or use "
                f"127.0.0.1."
            )
        if self.key is not None and len(self.key) < SHORTEST_KEY:
            raise RedlineError(f"the key must have at least {SHORTEST_KEY} characters, not {len(self.key)}.")
        # A surrogate means that the key was not UTF-8: Python decodes other bytes of the command line to surrogates.
        if self.key is not None and any("\ud800" <= letter <= "\udfff" for letter in self.key):
            raise RedlineError("the key is not valid UTF-8: use letters, digits and punctuation.")

    def why_not_host(self, host: str | None) -> str:
        """Returns why a request with this Host header is refused, or an empty string."""
        name = _name(f"//{host}") if host else None
        if name is None or not self._is_allowed(name):
            return f"the Host header {_short(host)} does not name this machine."
        return ""

    def why_not_origin(self, origin: str | None, host: str | None) -> str:
        """Returns why this origin is refused, or an empty string. Browsers send an Origin for every WebSocket."""
        if origin is None:
            return "the request has no Origin header, so it does not come from this page."
        scheme, _, place = origin.partition("://")
        if scheme not in ("http", "https") or not host or place.lower() != host.lower():
            return f"requests from the origin {_short(origin)} are refused: it is not the origin of this page."
        return ""

    def why_not_key(self, key: str | None, token: str | None) -> str:
        if self.key is None or _same(key, self.key) or _same(token, self.token):
            return ""
        return "the key is missing or wrong: open the address that redline printed."

    def _is_allowed(self, name: str) -> bool:
        address = _address(name)
        if is_loopback(self.host):
            return is_loopback(name) or name in self._host_names()
        # A numeric address is always allowed, because DNS rebinding requires a host name.
        return address is not None or name in {*self._host_names(), "localhost"}

    def _host_names(self) -> set[str]:
        ours = set() if is_loopback(self.host) else {self.host, socket.gethostname(), f"{socket.gethostname()}.local"}
        return {name.lower() for name in (*self.names, *ours)}


def _same(given: str | None, right: str) -> bool:
    # Header bytes that are not UTF-8 are decoded to surrogates, which a strict encoding would reject with an exception.
    return given is not None and hmac.compare_digest(given.encode("utf-8", "surrogatepass"), right.encode("utf-8"))


def _name(url: str) -> str | None:
    with suppress(ValueError):
        return urlsplit(url).hostname


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    with suppress(ValueError):
        return ipaddress.ip_address(host)


def _short(text: str | None) -> str:
    return "(none)" if text is None else repr(text[:80])

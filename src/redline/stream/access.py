"""Who may talk to the page: a key, compared in constant time, and headers that only the page itself can send.

Any web site can make a browser send requests to 127.0.0.1. So the Host header has to name this machine (a name of
somebody else's that was made to point here, DNS rebinding, does not), and a socket is opened only for the origin that
served the page. An address that others can reach needs a key besides.
"""

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
    """Returns the addresses under which a server that listens at this host is opened, with the key in them."""
    query = f"?key={quote(key, safe='')}" if key is not None else ""
    hosts = (f"[{shown}]" if ":" in shown else shown for shown in reachable_hosts(host))
    return tuple(f"{scheme}://{shown}:{port}{path}{query}" for shown in hosts)


def reachable_hosts(host: str) -> tuple[str, ...]:
    """Returns the addresses of this machine that others can use, where the server listens at all of them."""
    if host not in _ANY:
        return (host,)
    family, elsewhere, loopback = _ANY[host]
    found = list[str]()
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        # Sends nothing: it only asks which address would be used. This one is of a documentation network.
        probe.connect((elsewhere, 9))
        found.append(probe.getsockname()[0])
    with suppress(OSError):
        found += [str(entry[4][0]) for entry in socket.getaddrinfo(socket.gethostname(), None, family)]
    usable = [shown for shown in found if (known := _address(shown)) and not known.is_loopback | known.is_link_local]
    return tuple(dict.fromkeys(usable)) or (loopback,)


@dataclass(frozen=True)
class Access:
    """`names` are further host names under which the page may be asked for, such as that of a proxy in front of it.

    `token` is what a browser is given for the key, so that the key does not stay in its address bar.
    """

    host: str
    key: str | None = field(default=None, repr=False)
    names: tuple[str, ...] = ()
    token: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)

    def __post_init__(self) -> None:
        if self.key is None and not is_loopback(self.host):
            raise RedlineError(
                f"{self.host!r} can be reached from other machines: give a --key, a --key-file or REDLINE_KEY, or stay "
                f"on 127.0.0.1."
            )
        if self.key is not None and len(self.key) < SHORTEST_KEY:
            raise RedlineError(f"a key has at least {SHORTEST_KEY} characters, not {len(self.key)}.")
        if self.key is not None and not _is_text(self.key):
            raise RedlineError("the key is not valid UTF-8: choose one of letters, digits and punctuation.")

    def why_not_host(self, host: str | None) -> str:
        """Why a request with this Host header is refused, or nothing."""
        name = _name(f"//{host}") if host else None
        if name is None or not self._is_ours(name):
            return f"this page is not to be asked for as {_short(host)}."
        return ""

    def why_not_origin(self, origin: str | None, host: str | None) -> str:
        """Browsers send the origin with every socket; one that is missing comes from no page of ours."""
        if origin is None:
            return "a request without an Origin does not come from this page."
        scheme, _, place = origin.partition("://")
        if scheme not in ("http", "https") or not host or place.lower() != host.lower():
            return f"requests of {_short(origin)} are refused: they do not come from this page."
        return ""

    def why_not_key(self, key: str | None, token: str | None) -> str:
        if self.key is None or _same(key, self.key) or _same(token, self.token):
            return ""
        return "the key is missing or wrong: open the address that redline printed."

    def _is_ours(self, name: str) -> bool:
        address = _address(name)
        if is_loopback(self.host):
            return is_loopback(name) or name in self._named()
        # Nobody can make a bare address point elsewhere.
        return address is not None or name in {*self._named(), "localhost"}

    def _named(self) -> set[str]:
        ours = set() if is_loopback(self.host) else {self.host, socket.gethostname(), f"{socket.gethostname()}.local"}
        return {name.lower() for name in (*self.names, *ours)}


def _same(given: str | None, right: str) -> bool:
    # Surrogates come from undecodable bytes in a header, and must not raise here.
    return given is not None and hmac.compare_digest(given.encode("utf-8", "surrogatepass"), right.encode("utf-8"))


def _is_text(key: str) -> bool:
    """Returns False if the key has surrogates: bytes of an argument or of the environment that are not UTF-8."""
    try:
        key.encode()
    except UnicodeEncodeError:
        return False
    return True


def _name(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _short(text: str | None) -> str:
    return "nothing" if text is None else repr(text[:80])

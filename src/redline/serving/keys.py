"""API keys: several, from a file or the environment, compared in constant time."""

import hashlib
import hmac
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from redline.errors import RedlineError
from redline.web.access import SHORTEST_KEY

KEYS_VARIABLE = "REDLINE_API_KEYS"
_LARGEST_FILE = 1 << 20
_LINE = re.compile(r"(?:(?P<name>[\w.@-]{1,64})\s*=\s*)?(?P<key>\S+)")


@dataclass(frozen=True)
class Caller:
    """Who sent a request. `salt` keeps the cached prefixes and the sessions of different keys apart."""

    name: str
    salt: str


ANYONE = Caller("anyone", "")


@dataclass(frozen=True)
class Keys:
    """The keys of a server; without keys, everyone may call it."""

    callers: dict[bytes, Caller] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, named: dict[str, str]) -> "Keys":
        """Returns the API keys of clients; `named` maps the name of a client to its key."""
        callers = {}
        for name, key in named.items():
            if len(key) < SHORTEST_KEY:
                raise RedlineError(
                    f"the API key {name!r} has {len(key)} characters; at least {SHORTEST_KEY} are needed."
                )
            if not key.isascii() or not key.isprintable():
                raise RedlineError(f"the API key {name!r} must consist of printable ASCII characters.")
            digest = _digest(key)
            callers[digest] = Caller(name, digest.hex()[:32])
        return cls(callers)

    def find(self, key: str | None) -> Caller | None:
        """Returns the caller with this key. The time does not depend on which key matches, or how much of it."""
        if not self.callers:
            return ANYONE
        digest = _digest(key or "")
        found = None
        for known, caller in self.callers.items():
            if hmac.compare_digest(known, digest):
                found = caller
        return found


def read_keys(key: str | None = None, file: Path | None = None) -> Keys:
    """Returns the keys of the option, the file and REDLINE_API_KEYS (separated by commas), all together.

    A file has one key per line, or NAME = KEY; blank lines and lines that start with # are ignored.
    """
    found = {} if key is None else {"key": key}
    if file is not None:
        found |= _read_file(file)
    listed = [part.strip() for part in os.environ.get(KEYS_VARIABLE, "").split(",") if part.strip()]
    found |= {f"environment-{number}": part for number, part in enumerate(listed, 1)}
    return Keys.of(found)


def _read_file(path: Path) -> dict[str, str]:
    try:
        with path.open("rb") as file:
            text = file.read(_LARGEST_FILE + 1).decode()
    except OSError as error:
        raise RedlineError(f"cannot read the API keys from {str(path)!r}: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise RedlineError(f"the API keys in {str(path)!r} are not UTF-8 text.") from error
    if len(text) > _LARGEST_FILE:
        raise RedlineError(f"the file of API keys {str(path)!r} is larger than {_LARGEST_FILE >> 20} MiB.")
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        parts = _LINE.fullmatch(line)
        if parts is None:
            raise RedlineError(f"{str(path)!r}, line {number}: write one key per line, or NAME = KEY.")
        name = parts["name"] or f"line-{number}"
        if name in found:
            raise RedlineError(f"{str(path)!r}, line {number}: the name {name!r} occurs twice.")
        found[name] = parts["key"]
    if not found:
        raise RedlineError(f"the file of API keys {str(path)!r} contains no key.")
    return found


def _digest(key: str) -> bytes:
    # Comparing digests hides the length of the keys as well.
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()

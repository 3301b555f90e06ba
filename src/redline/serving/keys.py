"""Reads API keys from an option, a file and the environment, and compares them in constant time."""

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
    """Identifies the API key of a request. `salt` separates the cached prefixes and the sessions of different keys."""

    name: str
    salt: str


ANYONE = Caller("anyone", "")


@dataclass(frozen=True)
class Keys:
    """Holds the API keys of a server. A server without keys accepts requests from everyone who can reach it."""

    callers: dict[bytes, Caller] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, named: dict[str, str]) -> "Keys":
        """Returns the checked API keys. `named` maps the name of each client to its key."""
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
        """Returns the caller with this key, None if the key is unknown, or ANYONE if the server has no keys.

        The run time does not depend on which key matches, or on how many of its characters match.
        """
        if not self.callers:
            return ANYONE
        digest = _digest(key or "")
        found = None
        for known, caller in self.callers.items():
            if hmac.compare_digest(known, digest):
                found = caller
        return found


def read_keys(key: str | None = None, file: Path | None = None) -> Keys:
    """Returns all keys: that of the option, those of the file, and those of REDLINE_API_KEYS (separated by commas).

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
    # Keys are compared as digests of equal length, so that the time does not reveal the length of a key.
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()

"""Parses and formats durations, sizes (`16ms`, `8GiB`) and addresses of servers; splits the one-line form of plans."""

import re
from urllib.parse import urlsplit

from redline.errors import RedlineError

_SECONDS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_BYTES = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_QUANTITY = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([A-Za-zµ]+)\s*")


def _parse(text: str, units: dict[str, float] | dict[str, int], kind: str) -> float:
    match = _QUANTITY.fullmatch(text)
    lowered = {unit.lower(): size for unit, size in units.items()}
    if match is None or match[2].lower() not in lowered:
        raise RedlineError(f"{text!r} is not {kind}: write a number and one of {', '.join(units)}.")
    value = float(match[1]) * lowered[match[2].lower()]
    if value <= 0:
        raise RedlineError(f"{text!r} is not {kind} above zero.")
    return value


def parse_seconds(text: str) -> float:
    """Converts `16ms` to 0.016."""
    return _parse(text, _SECONDS, "a duration")


def parse_bytes(text: str) -> int:
    """Converts `8GiB` to 8589934592."""
    return int(_parse(text, _BYTES, "a size"))


def parse_server_url(text: str) -> str:
    """Returns the address of an OpenAI-compatible server without /v1: `host:8000/v1/` gives `http://host:8000`."""
    url = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(url)
        is_usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_usable = False
    if not is_usable or not re.fullmatch(r"[!-~]+", url) or "?" in url or "#" in url:
        raise RedlineError(f"{text!r} is not the address of a server: write for example http://127.0.0.1:8000.")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def format_seconds(seconds: float) -> str:
    """Formats a duration with three significant digits and a suitable unit: `16 ms`, `90 s`, `5 min`."""
    if seconds != seconds:
        return "n/a"
    for limit, scale, unit in ((1e-3, 1e6, "µs"), (1.0, 1e3, "ms"), (120.0, 1.0, "s"), (7200.0, 1 / 60, "min")):
        if abs(seconds) < limit:
            return f"{_three_digits(seconds * scale)} {unit}"
    return f"{_three_digits(seconds / 3600)} h"


def format_bytes(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 2**10 * _BYTES[unit]:
            return f"{_three_digits(size / _BYTES[unit])} {unit}"
    return f"{_three_digits(size / 2**40)} TiB"


def format_megapixels(pixels: int) -> str:
    """Formats a number of pixels with three significant digits, as in `0.0023 megapixels`."""
    size = pixels / 1e6
    return f"{size:.3g} megapixels" if size < 999.5 else f"{size:,.0f} megapixels"


def format_rate(per_second: float, unit: str) -> str:
    """Formats a rate with a metric prefix: 7.84e14 and 'FLOP/s' give `784 TFLOP/s`."""
    for limit, scale, prefix in ((1e6, 1e3, "K"), (1e9, 1e6, "M"), (1e12, 1e9, "G"), (1e15, 1e12, "T")):
        if per_second < limit:
            return f"{_three_digits(per_second / scale)} {prefix}{unit}"
    return f"{_three_digits(per_second / 1e15)} P{unit}"


def _three_digits(value: float) -> str:
    """Formats a number with three significant digits, but with all digits before the decimal point."""
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:.0f}"


def split_outside_brackets(text: str, separators: str) -> list[str]:
    """Splits at separators outside of brackets: `a(b, c), d` gives [`a(b, c)`, ` d`]. Keeps empty parts."""
    parts, depth, start = [], 0, 0
    for index, char in enumerate(text):
        depth += (char in "([") - (char in ")]")
        if char in separators and depth == 0:
            parts.append(text[start:index])
            start = index + 1
    return [*parts, text[start:]]

"""Compares a text with a committed golden file in tests/data/goldens.

`REDLINE_WRITE_GOLDENS=1 pytest …` writes the files anew; look at the difference before it is committed.
"""

import os
import re
from pathlib import Path

FOLDER = Path(__file__).with_name("data") / "goldens"
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)")


def check_golden(name: str, text: str) -> None:
    """Words and whole numbers must be equal; the last decimal may differ by one, because another libm may round it."""
    path = FOLDER / name
    if os.environ.get("REDLINE_WRITE_GOLDENS"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    seen, expected = text.splitlines(), path.read_text().splitlines()
    for number, (line, golden) in enumerate(zip(seen, expected, strict=False), 1):
        assert _agree(line, golden), f"{name}:{number}: {line!r} is not {golden!r}"
    assert len(seen) == len(expected)


def _agree(line: str, golden: str) -> bool:
    if line == golden:
        return True
    parts, wanted = _NUMBER.split(line), _NUMBER.split(golden)
    if len(parts) != len(wanted):
        return False
    return all(one == other or _close(one, other) for one, other in zip(parts, wanted, strict=True))


def _close(one: str, other: str) -> bool:
    decimals = len(one.partition(".")[2])
    if not (decimals and _NUMBER.fullmatch(other)) or len(other.partition(".")[2]) != decimals:
        return False
    return abs(float(one) - float(other)) < 1.5 * 10**-decimals

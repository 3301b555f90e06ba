"""Malformed variants of a valid file: every value replaced, keys left out, bytes flipped, and so on."""

import hashlib
import io
import json
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch

# JSON can spell these, and Python's reader takes them.
_ODD_TEXT = {"@digits": "9" * 5000, "@nan": "NaN", "@infinite": "-Infinity", "@half": '"\\ud800"'}
_ODD: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    10**30,
    1e300,
    -1e300,
    0.5,
    "",
    "x",
    "\0",
    [],
    {},
    [[]],
    {"": []},
    *_ODD_TEXT,
)
_ODD_TOML = ("nan", "-inf", "0", "-1", "1e300", "true", "''", "[]", "{}", "[[], 1]", "1979-05-27", "0x" + "F" * 9999)
_DEEP = 200_000


def fuzz_bytes(sample: bytes, chance: random.Random) -> Iterator[bytes]:
    """Without knowing the format."""
    yield from (b"", b"\0", b"\xff\xfe" * 8, b"[" * _DEEP, sample + sample, b"\xef\xbb\xbf" + sample, sample[::-1])
    while True:
        place = chance.randrange(len(sample) + 1)
        yield sample[:place]
        flipped = bytearray(sample)
        for _ in range(chance.choice((1, 1, 4))):
            flipped[chance.randrange(len(flipped))] ^= 1 << chance.randrange(8)
        yield bytes(flipped)
        yield sample[:place] + chance.randbytes(chance.randrange(1, 9)) + sample[place:]


def fuzz_json(sample: bytes, chance: random.Random) -> Iterator[bytes]:
    """A document with one value of the wrong kind, a key left out or added; now and then only bytes."""
    text = sample.decode()
    document = json.loads(text)
    yield text.encode("utf-16")
    yield b"[" * _DEEP + b"]" * _DEEP
    yield b'{"a":' * _DEEP + b"1" + b"}" * _DEEP
    if isinstance(document, dict) and document:
        yield ("{" + '"x": 1, "x": 2, ' + text.lstrip()[1:]).encode()
    yield from (_spell(value) for value in _ODD)
    places, others = list(_places(document)), fuzz_bytes(sample, chance)
    chance.shuffle(places)
    while True:
        for place in places:
            for value in chance.sample(_ODD, 3):
                yield _spell(_changed(document, place, lambda parent, key, value=value: parent.__setitem__(key, value)))
            yield _spell(_changed(document, place, lambda parent, key: parent.__delitem__(key)))
            deep = "[" * 90 + "]" * 90
            marked = _changed(document, place, lambda parent, key: parent.__setitem__(key, "@deep"))
            yield _spell(marked).replace(b'"@deep"', deep.encode())
            yield next(others)
        yield next(others)


def fuzz_json_lines(sample: bytes, chance: random.Random) -> Iterator[bytes]:
    first, *rest = sample.splitlines()
    for line in fuzz_json(first, chance):
        yield b"\n".join((line, *rest)) + b"\n"


def fuzz_toml(sample: bytes, chance: random.Random) -> Iterator[bytes]:
    """One setting with another value, left out or twice."""
    lines, others = sample.decode().splitlines(), fuzz_bytes(sample, chance)
    settings = [number for number, line in enumerate(lines) if re.match(r"\s*[\w.]+\s*=", line)]
    yield "\n".join(lines).encode("utf-16")
    for odd in ("9" * 5000, "[" * 5000 + "]" * 5000, "[" * 90 + "]" * 90, "{a=" * 3000 + "1" + "}" * 3000):
        yield f"x = {odd}\n".encode()
        for number in settings:
            yield _with_line(lines, number, f"{lines[number].partition('=')[0]}= {odd}")
    while True:
        for number in settings:
            name = lines[number].partition("=")[0]
            for value in chance.sample(_ODD_TOML, 3):
                yield _with_line(lines, number, f"{name}= {value}")
            yield _with_line(lines, number, "")
            yield _with_line(lines, number, f"{lines[number]}\n{lines[number]}")
            yield _with_line(lines, number, f"{name}.{name.strip()} = 1")
            yield next(others)
        yield next(others)


def fuzz_safetensors(sample: bytes, chance: random.Random) -> Iterator[bytes]:
    """Bytes, or a header that was changed and has its right length."""
    size = int.from_bytes(sample[:8], "little")
    header, body, others = sample[8 : 8 + size], sample[8 + size :], fuzz_bytes(sample, chance)
    for changed in fuzz_json(header, chance):
        yield len(changed).to_bytes(8, "little") + changed + body
        yield next(others)


def fuzz_metadata(sample: bytes, chance: random.Random) -> Iterator[bytes]:
    """The JSON documents that stand as texts in a safetensors file's header."""
    size = int.from_bytes(sample[:8], "little")
    header, body = json.loads(sample[8 : 8 + size]), sample[8 + size :]
    documents = {name: text for name, text in header["__metadata__"].items() if text[:1] in ("{", "[")}
    sources = {name: fuzz_json(text.encode(), chance) for name, text in documents.items()}
    while True:
        for name, source in sources.items():
            about = {**header["__metadata__"], name: next(source).decode("utf-8", "replace")}
            changed = json.dumps({**header, "__metadata__": about}).encode()
            yield len(changed).to_bytes(8, "little") + changed + body


def fuzz_checkpoint(sample: bytes, chance: random.Random) -> Iterator[bytes]:
    """With the right checksum, other values; and other bytes, with and without it."""
    magic, payload, others = sample[:8], sample[40:], fuzz_bytes(sample, chance)
    content, flipped = torch.load(io.BytesIO(payload), weights_only=True), fuzz_bytes(payload, chance)
    odd = (None, -1, 10**30, float("nan"), "x", "{}", "[]", "[" * 9999, [], {}, {"a": 1}, torch.ones(2))

    def sealed(data: bytes) -> bytes:
        return magic + hashlib.sha256(data).digest() + data

    while True:
        for outer in (content, *(value for value in content.values() if isinstance(value, dict))):
            for key in list(outer):
                kept = outer[key]
                outer[key] = chance.choice(odd)
                buffer = io.BytesIO()
                torch.save(content, buffer)
                outer[key] = kept
                yield sealed(buffer.getvalue())
            yield sealed(next(flipped))
            yield next(others)


def _spell(document: Any) -> bytes:
    text = json.dumps(document)
    for mark, odd in _ODD_TEXT.items():
        text = text.replace(f'"{mark}"', odd)
    return text.encode()


def _places(document: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(document, (dict, list)):
        for key in document if isinstance(document, dict) else range(min(len(document), 3)):
            yield (*place, key)
            yield from _places(document[key], (*place, key))


def _changed(document: Any, place: tuple[Any, ...], change: Callable[[Any, Any], None]) -> Any:
    copy = json.loads(json.dumps(document))
    parent = copy
    for key in place[:-1]:
        parent = parent[key]
    change(parent, place[-1])
    return copy


def _with_line(lines: list[str], number: int, line: str) -> bytes:
    return "\n".join([*lines[:number], line, *lines[number + 1 :]]).encode() + b"\n"

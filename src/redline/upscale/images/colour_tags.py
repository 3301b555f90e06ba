"""Reads and writes all colour tags of a file except the ICC profile, and represents these tags as PNG chunks.

AVIF has CICP numbers for primaries and transfer, which PNG has too. The other formats have no such tags. AVIF stores
the numbers as a property of the main image item, which libvips neither reads nor writes. `set_cicp` usually
adds this property to a file written by libvips. This moves the pixel data, so its offsets are updated.
"""

import struct
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

from redline.upscale.images.formats import Format, ImageError, boxes, insert
from redline.upscale.images.png import Chunk, read_colours

_CICP, _SRGB = b"cICP", b"sRGB"
# The values of sRGB: CICP numbers, and the gamma and chromaticities of PNG, with a tolerance because programs round
# them differently.
_SRGB_PRIMARIES, _SRGB_TRANSFERS = (1, 2), (13, 2)
_SRGB_NUMBERS = {b"gAMA": (45_455,), b"cHRM": (31_270, 32_900, 64_000, 33_000, 30_000, 60_000, 15_000, 6_000)}
_NEAR = 100
# The CICP matrix and range of decoded pixels: RGB in full range.
_OF_PIXELS = bytes([0, 1])
# The matrix and range that the encoder uses if the file does not specify them: BT.601, full range.
_DEFAULT_MATRIX = struct.pack(">HB", 6, 0x80)
# The length, name, version and flags at the start of the meta box.
_META_HEAD_BYTES = 12
_DAMAGED = (KeyError, IndexError, ValueError, struct.error)


def read_colour_tags(path: Path, form: Format, has_profile: bool) -> tuple[Chunk, ...]:
    if form.name == "png":
        return read_colours(path)
    # In AVIF, a profile takes precedence over CICP. In PNG, CICP takes precedence, so CICP must not be copied from an
    # AVIF file that has a profile.
    if form.name not in ("avif", "heic") or has_profile or (numbers := read_cicp(path)) is None or max(numbers) > 255:
        return ()
    tag = Chunk(_CICP, bytes(numbers) + _OF_PIXELS)
    return () if _is_srgb(tag) else (tag,)


def fit_colour_tags(tags: tuple[Chunk, ...], form: Format, has_profile: bool) -> tuple[tuple[Chunk, ...], str]:
    """Returns the tags that the format can hold, and a note if the loss of the others may change the colours."""
    if form.name == "png":
        return tags, ""
    kept = tuple(tag for tag in tags if form.name == "avif" and numbers_of(tag))
    # If a profile, CICP or sRGB defines the colours, all other tags except CICP are a fallback for programs that ignore
    # this definition, so the loss of these tags is not reported.
    is_told = has_profile or kept or any(tag.kind == _SRGB for tag in tags)
    lost = [tag for tag in tags if tag not in kept and not _is_srgb(tag) and not (is_told and tag.kind != _CICP)]
    names = ", ".join(tag.kind.decode() for tag in lost)
    return kept, f"{form.title} cannot hold {names}, which define its colours" if lost else ""


def numbers_of(tag: Chunk) -> tuple[int, int] | None:
    """Returns primaries and transfer of a CICP tag for full-range RGB, else None."""
    return (tag.data[0], tag.data[1]) if tag.kind == _CICP and tag.data[2:] == _OF_PIXELS else None


def _is_srgb(tag: Chunk) -> bool:
    expected = _SRGB_NUMBERS.get(tag.kind, ())
    if expected and len(tag.data) == 4 * len(expected):
        found = struct.unpack(f">{len(expected)}I", tag.data)
        return all(abs(one - other) <= _NEAR for one, other in zip(found, expected, strict=True))
    primaries, transfer = numbers_of(tag) or (0, 0)
    return tag.kind == _SRGB or (primaries in _SRGB_PRIMARIES and transfer in _SRGB_TRANSFERS)


def read_cicp(path: Path) -> tuple[int, int] | None:
    """Returns the numbers of primaries and transfer of the main image, if it has them."""
    try:
        with open(path, "rb") as file:
            start, end = _find_meta(file)
            file.seek(start)
            meta = dict(_boxes(file.read(end - start)[_META_HEAD_BYTES:]))
        _, _, properties, index = _find_numbers(meta)
        primaries, transfer = struct.unpack_from(">HH", properties[index - 1][1], 4) if index else (0, 0)
        return (primaries, transfer) if index else None
    except _DAMAGED:
        return None


def set_cicp(path: Path, primaries: int, transfer: int) -> None:
    """Adds or replaces the CICP numbers of the main image."""
    with open(path, "r+b") as file:
        try:
            start, end = _find_meta(file)
            file.seek(start)
            changed = _with_numbers(file.read(end - start), struct.pack(">HH", primaries, transfer))
        except _DAMAGED as error:
            raise ImageError(f"cannot write {str(path)!r}: it has no AVIF properties for the colours.") from error
        if len(changed) > end - start:
            insert(file, end, bytes(len(changed) - (end - start)))
        file.seek(start)
        file.write(changed)


def _with_numbers(meta: bytes, numbers: bytes) -> bytes:
    items = _boxes(meta[_META_HEAD_BYTES:])
    found = dict(items)
    main, owners, properties, index = _find_numbers(found)
    if index is None:
        properties.append((b"colr", b"nclx" + numbers + _DEFAULT_MATRIX))
        owners = _with_owner(main, len(properties), owners)
    else:
        properties[index - 1] = (b"colr", b"nclx" + numbers + properties[index - 1][1][8:])
    changed = {b"iprp": _box(b"ipco", _joined(properties)) + _box(b"ipma", owners)}
    changed[b"iloc"] = _moved(found[b"iloc"], len(changed[b"iprp"]) - len(found[b"iprp"]))
    return _box(b"meta", meta[8:_META_HEAD_BYTES] + _joined([(kind, changed.get(kind, body)) for kind, body in items]))


def _find_numbers(meta: dict[bytes, bytes]) -> tuple[int, bytes, list[tuple[bytes, bytes]], int | None]:
    """Returns the main item, the table of items with properties, the properties, and the CICP's index (from 1)."""
    inside = dict(_boxes(meta[b"iprp"]))
    owners, properties = inside[b"ipma"], _boxes(inside[b"ipco"])
    main = struct.unpack_from(">I" if meta[b"pitm"][0] else ">H", meta[b"pitm"], 4)[0]
    for number, at, count, width in _owners(owners):
        if number == main:
            # The highest bit marks an essential property.
            indices = struct.unpack_from(f">{count}{'H' if width == 2 else 'B'}", owners, at + 1)
            indices = [index & (0x7FFF if width == 2 else 0x7F) for index in indices]
            kinds = {index: properties[index - 1][0] + properties[index - 1][1][:4] for index in indices}
            return main, owners, properties, next((at for at, kind in kinds.items() if kind == b"colrnclx"), None)
    return main, owners, properties, None


def _with_owner(item: int, index: int, owners: bytes) -> bytes:
    """Returns the table of items and their properties, with the property `index` added to `item`."""
    for number, at, count, width in _owners(owners):
        if number == item:
            end = at + 1 + count * width
            return owners[:at] + bytes([count + 1]) + owners[at + 1 : end] + index.to_bytes(width, "big") + owners[end:]
    raise ValueError("the main image has no properties")


def _owners(table: bytes) -> Iterator[tuple[int, int, int, int]]:
    """Yields each item, the offset of its property count, that count, and the bytes per property index."""
    number_bytes, width, at = 4 if table[0] else 2, 2 if table[3] & 1 else 1, 8
    for _ in range(struct.unpack_from(">I", table, 4)[0]):
        item, at = int.from_bytes(table[at : at + number_bytes], "big"), at + number_bytes
        yield item, at, table[at], width
        at += 1 + table[at] * width


def _moved(table: bytes, by: int) -> bytes:
    """Returns the table of item locations with the offsets of items in the file increased by `by`."""
    moved, version = bytearray(table), table[0]
    offset, length, base, index = table[4] >> 4, table[4] & 15, table[5] >> 4, table[5] & 15
    number_bytes = 2 if version < 2 else 4
    count, at = int.from_bytes(table[6 : 6 + number_bytes], "big"), 6 + number_bytes

    def move(at: int, width: int) -> None:
        moved[at : at + width] = (int.from_bytes(moved[at : at + width], "big") + by).to_bytes(width, "big")

    for _ in range(count):
        at += number_bytes
        method = struct.unpack_from(">H", table, at)[0] & 15 if version else 0
        base_at = at + (4 if version else 2)
        if base and method == 0:
            move(base_at, base)
        extents, at = struct.unpack_from(">H", table, base_at + base)[0], base_at + base + 2
        for _ in range(extents):
            at += index if version else 0
            if not base and method == 0:
                move(at, offset)
            at += offset + length
    return bytes(moved)


def _find_meta(file: BinaryIO) -> tuple[int, int]:
    """Returns the start and the end of the meta box with its length and name; raises ValueError without one."""
    for kind, begin, end in boxes(file):
        if kind == b"meta":
            return begin - 8, end
    raise ValueError("no meta box")


def _boxes(body: bytes) -> list[tuple[bytes, bytes]]:
    found = [(kind, body[begin:end]) for kind, begin, end in boxes(BytesIO(body))]
    if sum(8 + len(inside) for _, inside in found) != len(body):
        raise ValueError("the boxes are damaged")
    return found


def _joined(boxes: list[tuple[bytes, bytes]]) -> bytes:
    return b"".join(_box(kind, body) for kind, body in boxes)


def _box(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I4s", 8 + len(body), kind) + body

"""Colour tags of a file other than an ICC profile, represented as PNG chunks.

AVIF has CICP numbers for primaries and transfer, which PNG has too. The other formats have no such tags.
"""

import struct
from pathlib import Path

from redline.upscale.images.avif import read_cicp
from redline.upscale.images.formats import Format
from redline.upscale.images.png import Chunk, read_colours

_CICP, _SRGB = b"cICP", b"sRGB"
# CICP numbers, and tolerances for the numbers of PNG, which programs round differently.
_SRGB_PRIMARIES, _SRGB_TRANSFERS = (1, 2), (13, 2)
_SRGB_GAMMA, _NEAR_GAMMA = 45_455, 100
_SRGB_CHROMATICITIES, _NEAR_CHROMATICITY = (31_270, 32_900, 64_000, 33_000, 30_000, 60_000, 15_000, 6_000), 100
# RGB in full range, as decoded pixels are.
_OF_PIXELS = bytes([0, 1])


def read_colour_tags(path: Path, form: Format, has_profile: bool) -> tuple[Chunk, ...]:
    if form.name == "png":
        return read_colours(path)
    # In AVIF, a profile takes precedence over CICP; in PNG, CICP takes precedence.
    if form.name not in ("avif", "heic") or has_profile or (numbers := read_cicp(path)) is None or max(numbers) > 255:
        return ()
    tag = Chunk(_CICP, bytes(numbers) + _OF_PIXELS)
    return () if _is_srgb(tag) else (tag,)


def fit_colour_tags(tags: tuple[Chunk, ...], form: Format, has_profile: bool) -> tuple[tuple[Chunk, ...], str]:
    """Returns the tags that the format can hold, and a note if the loss of the others may change the colours."""
    if form.name == "png":
        return tags, ""
    kept = tuple(tag for tag in tags if form.name == "avif" and numbers_of(tag))
    # The remaining tags are a fallback for programs that do not support profiles, CICP or sRGB.
    is_told = has_profile or kept or any(tag.kind == _SRGB for tag in tags)
    lost = [tag for tag in tags if tag not in kept and not _is_srgb(tag) and not (is_told and tag.kind != _CICP)]
    names = ", ".join(tag.kind.decode() for tag in lost)
    return kept, f"{form.title} cannot hold {names}, which define its colours" if lost else ""


def numbers_of(tag: Chunk) -> tuple[int, int] | None:
    """Returns primaries and transfer of a CICP tag for full-range RGB, else None."""
    return (tag.data[0], tag.data[1]) if tag.kind == _CICP and tag.data[2:] == _OF_PIXELS else None


def _is_srgb(tag: Chunk) -> bool:
    match tag.kind, len(tag.data):
        case b"sRGB", _:
            return True
        case b"gAMA", 4:
            return _near(struct.unpack(">I", tag.data), (_SRGB_GAMMA,), _NEAR_GAMMA)
        case b"cHRM", 32:
            return _near(struct.unpack(">8I", tag.data), _SRGB_CHROMATICITIES, _NEAR_CHROMATICITY)
    numbers = numbers_of(tag)
    return numbers is not None and numbers[0] in _SRGB_PRIMARIES and numbers[1] in _SRGB_TRANSFERS


def _near(found: tuple[int, ...], expected: tuple[int, ...], most: int) -> bool:
    return all(abs(number - other) <= most for number, other in zip(found, expected, strict=True))

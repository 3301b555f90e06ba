"""What a file says of its colours beside a profile, by the names that PNG has for it.

AVIF says it in numbers for primaries and transfer (CICP), which PNG knows too; the other formats have no place for any.
"""

import struct
from pathlib import Path

from redline.upscale.images.avif import read_cicp
from redline.upscale.images.formats import Format
from redline.upscale.images.png import Chunk, read_colours

_CICP, _SRGB = b"cICP", b"sRGB"
# By CICP's numbers, and how far those of PNG may be off, which programs round differently.
_SRGB_PRIMARIES, _SRGB_TRANSFERS = (1, 2), (13, 2)
_SRGB_GAMMA, _NEAR_GAMMA = 45_455, 100
_SRGB_CHROMATICITIES, _NEAR_CHROMATICITY = (31_270, 32_900, 64_000, 33_000, 30_000, 60_000, 15_000, 6_000), 100
# RGB, and in full range: what is true of decoded pixels.
_OF_PIXELS = bytes([0, 1])


def read_colour_tags(path: Path, form: Format, has_profile: bool) -> tuple[Chunk, ...]:
    if form.name == "png":
        return read_colours(path)
    # A profile comes before numbers in AVIF, and after them in PNG.
    if form.name not in ("avif", "heic") or has_profile or (numbers := read_cicp(path)) is None or max(numbers) > 255:
        return ()
    tag = Chunk(_CICP, bytes(numbers) + _OF_PIXELS)
    return () if _is_srgb(tag) else (tag,)


def fit_colour_tags(tags: tuple[Chunk, ...], form: Format, has_profile: bool) -> tuple[tuple[Chunk, ...], str]:
    """Those that the format holds, and a note where colours may look different without the others."""
    if form.name == "png":
        return tags, ""
    kept = tuple(tag for tag in tags if form.name == "avif" and numbers_of(tag))
    # Others are for programs that know no profile, no numbers or no sRGB.
    is_told = has_profile or kept or any(tag.kind == _SRGB for tag in tags)
    lost = [tag for tag in tags if tag not in kept and not _is_srgb(tag) and not (is_told and tag.kind != _CICP)]
    names = ", ".join(tag.kind.decode() for tag in lost)
    return kept, f"{form.title} has no room for {names}, by which its colours are to be shown" if lost else ""


def numbers_of(tag: Chunk) -> tuple[int, int] | None:
    """Primaries and transfer, of a tag that says nothing else."""
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

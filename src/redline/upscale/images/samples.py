"""Converts the samples of a file to grey or RGB, with or without alpha, of 8 or 16 bits.

RGB keeps its colour space and its profile. All conversions are lazy: libvips applies them strip by strip.
"""

from pathlib import Path

from redline.upscale.images.formats import ImageError
from redline.upscale.images.vips import VipsImage, field

_GREY, _RGB = ("b-w", "grey16"), ("srgb", "rgb", "rgb16")
_BITS = {"uchar": 8, "ushort": 16}


def normalise(image: VipsImage, path: Path) -> tuple[VipsImage, tuple[str, ...]]:
    """Returns the image as one to four channels of 8 or 16 bits, and notes on conversions."""
    if image.format not in _BITS:
        raise ImageError(
            f"cannot read {str(path)!r}: its samples are of type {image.format}; convert it to 8 or 16 bits first."
        )
    notes: tuple[str, ...] = ()
    if image.interpretation == "cmyk":
        has_profile = field(image, "icc-profile-data") is not None
        whose = "its profile" if has_profile else "a generic profile, because it has none"
        image, notes = to_srgb(image), (f"CMYK was converted to sRGB with {whose}",)
    counts = (1, 2) if image.interpretation in _GREY else (3, 4)
    if image.interpretation not in _GREY + _RGB or image.bands not in counts:
        raise ImageError(
            f"cannot read {str(path)!r}: {image.bands} channels of {image.interpretation} are neither grey nor RGB."
        )
    return _to_full_range(image), notes


def bits_of(image: VipsImage) -> int:
    return _BITS[image.format]


def meaning_of(channels: int, deep: bool) -> str:
    """Returns libvips' name for the interpretation of grey or RGB samples of 8 or, if `deep`, 16 bits."""
    return ("grey16" if deep else "b-w") if channels < 3 else ("rgb16" if deep else "srgb")


def stretch(image: VipsImage, white: int) -> VipsImage:
    """Scales the samples so that `white` becomes the largest value of their type."""
    largest = 2 ** bits_of(image) - 1
    return image if white == largest else (image * (largest / white)).rint().cast(image.format)


def has_grey_profile(profile: bytes | None) -> bool:
    """Returns whether the header of an ICC profile names grey as its colour space."""
    return profile is not None and profile[16:20] == b"GRAY"


def to_srgb(image: VipsImage) -> VipsImage:
    """Converts with the profile of the image; CMYK without a profile uses a generic one."""
    return image.icc_transform(
        "srgb",
        embedded=field(image, "icc-profile-data") is not None,
        input_profile="cmyk",
        intent="relative",
        black_point_compensation=True,
        depth=bits_of(image),
    )


def _to_full_range(image: VipsImage) -> VipsImage:
    """Scales 10- and 12-bit AVIF, which libvips shifts to 16 bits (white is 65,472 or 65,520), to 65,535."""
    if image.format != "ushort" or field(image, "heif-compression") is None:
        return image
    bits = image.get("bits-per-sample")
    white = (2**bits - 1) << (16 - bits)
    return stretch(image, white).copy(interpretation=image.interpretation)

"""Whatever a file's samples are, as grey or RGB, with or without alpha, of 8 or 16 bits.

RGB stays in its own colour space, and its profile goes along. Everything here is lazy: libvips does it strip by strip
as rows are asked for.
"""

from pathlib import Path

from redline.upscale.images.errors import ImageError
from redline.upscale.images.vips import VipsImage, field

_GREY, _RGB = ("b-w", "grey16"), ("srgb", "rgb", "rgb16")
_BITS = {"uchar": 8, "ushort": 16}


def normalise(image: VipsImage, path: Path) -> tuple[VipsImage, tuple[str, ...]]:
    """The image as one to four channels of 8 or 16 bits, and notes on what had to be converted."""
    if image.format not in _BITS:
        raise ImageError(
            f"cannot read {str(path)!r}: its samples are of type {image.format}; convert it to 8 or 16 bits first."
        )
    notes: tuple[str, ...] = ()
    if image.interpretation == "cmyk":
        image, notes = _from_cmyk(image)
    if image.interpretation not in _GREY + _RGB or image.bands not in _channel_counts(image):
        raise ImageError(
            f"cannot read {str(path)!r}: {image.bands} channels of {image.interpretation} are neither grey nor RGB."
        )
    return _to_full_range(image), notes


def bits_of(image: VipsImage) -> int:
    return _BITS[image.format]


def _channel_counts(image: VipsImage) -> tuple[int, int]:
    return (1, 2) if image.interpretation in _GREY else (3, 4)


def has_grey_profile(profile: bytes | None) -> bool:
    """By the colour space that its header names."""
    return profile is not None and profile[16:20] == b"GRAY"


def to_srgb(image: VipsImage) -> VipsImage:
    """By the image's own profile; of CMYK that has none, by a general one."""
    return image.icc_transform(
        "srgb",
        embedded=field(image, "icc-profile-data") is not None,
        input_profile="cmyk",
        intent="relative",
        black_point_compensation=True,
        depth=bits_of(image),
    )


def _from_cmyk(image: VipsImage) -> tuple[VipsImage, tuple[str, ...]]:
    embedded = field(image, "icc-profile-data") is not None
    whose = "its own profile" if embedded else "a general profile, since it has none"
    return to_srgb(image), (f"CMYK was converted to sRGB with {whose}",)


def _to_full_range(image: VipsImage) -> VipsImage:
    """AVIF of 10 or 12 bits arrives shifted to 16, so that white is 65,472 or 65,520: it is stretched to 65,535."""
    if image.format != "ushort" or field(image, "heif-compression") is None:
        return image
    bits = image.get("bits-per-sample")
    white = (2**bits - 1) << (16 - bits)
    return (image * (65535 / white)).rint().cast("ushort").copy(interpretation=image.interpretation)

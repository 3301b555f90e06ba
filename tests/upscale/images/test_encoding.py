"""How samples are rounded to a format, and which options its encoder gets."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from redline.upscale.images.formats import FORMATS, ImageError
from redline.upscale.images.sink import Encoding, _saver, round_to, samples_of


def form(name: str) -> Any:
    return FORMATS[name]


def image(width: int = 64, height: int = 64, bands: int = 3, deep: bool = False) -> Any:
    return SimpleNamespace(width=width, height=height, bands=bands, format="ushort" if deep else "uchar")


@pytest.mark.parametrize(
    ("bands", "deep", "big"), [(1, False, False), (1, True, True), (2, False, True)], ids=["fits", "16 bits", "2 bands"]
)
def test_a_tiff_above_two_gigabytes_is_a_big_one(bands: int, deep: bool, big: bool) -> None:
    name, options = _saver(image(2**16, 2**15, bands, deep), form("tiff"), Encoding())
    assert name == "tiffsave" and options["bigtiff"] is big


def test_each_format_has_its_own_defaults_and_takes_what_is_given() -> None:
    assert _saver(image(), form("png"), Encoding())[1]["compression"] == 2
    assert _saver(image(), form("jpeg"), Encoding()) == ("jpegsave", {"Q": 95})
    assert _saver(image(), form("jpeg"), Encoding(quality=3)) == ("jpegsave", {"Q": 3})
    webp = {"Q": 90, "lossless": False, "effort": 2, "exact": False}
    assert _saver(image(), form("webp"), Encoding()) == ("webpsave", webp)
    assert _saver(image(), form("webp"), Encoding(lossless=True))[1] == {**webp, "lossless": True, "exact": True}
    for deep, bits in ((False, 8), (True, form("avif").bits)):
        assert _saver(image(deep=deep), form("avif"), Encoding())[1] == {
            "Q": 80,
            "lossless": False,
            "effort": 0,
            "compression": "av1",
            "bitdepth": bits,
        }


@pytest.mark.parametrize("quality", [0, 101])
def test_a_quality_beyond_its_limits_is_refused(quality: int) -> None:
    with pytest.raises(ImageError, match="must be between"):
        Encoding(quality)


def test_a_quality_at_its_limits_is_taken() -> None:
    Encoding(1)
    Encoding(100)


def test_samples_are_rounded_to_the_nearest_that_a_format_holds() -> None:
    rows = np.array([0, 127, 128, 129, 385, 386, 65535 - 129, 65535 - 128, 65535], np.uint16)
    assert round_to(rows, form("jpeg")).tolist() == [0, 0, 0, 1, 1, 2, 254, 255, 255]
    assert round_to(rows, form("jpeg")).dtype == np.uint8
    twelve = round_to(np.array([0, 8, 9, 65535], np.uint16), form("avif"))
    assert twelve.tolist() == [0, 0, 1 << 4, 4095 << 4] and twelve.dtype == np.uint16
    assert round_to(rows, form("png")) is rows
    small = rows.astype(np.uint8)
    assert round_to(small, form("jpeg")) is small


def test_a_format_stores_no_more_bits_than_there_are() -> None:
    assert samples_of(form("png"), 8) == np.uint8 and samples_of(form("png"), 10) == np.uint16
    assert samples_of(form("jpeg"), 16) == np.uint8 and samples_of(form("avif"), 16) == np.uint16

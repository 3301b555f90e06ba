"""What says how colours are to be shown is kept where the format has a place for it, and otherwise said to be lost."""

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageCms

from redline.upscale.images.colour_tags import read_cicp, set_cicp
from redline.upscale.images.metadata import Metadata
from redline.upscale.images.png import Chunk, add_to_png, read_colours
from redline.upscale.images.sink import Encoding, ImageSink
from redline.upscale.images.source import open_image

Make = Callable[..., np.ndarray]
Copy = Callable[..., tuple[str, ...]]

WIDE = Chunk(b"cICP", bytes([9, 16, 0, 1]))
LINEAR = Chunk(b"gAMA", struct.pack(">I", 100_000))
SRGB = (
    Chunk(b"gAMA", struct.pack(">I", 45_455)),
    Chunk(b"cHRM", struct.pack(">8I", 31_270, 32_900, 64_000, 33_000, 30_000, 60_000, 15_000, 6_000)),
    Chunk(b"sRGB", b"\0"),
    Chunk(b"cICP", bytes([1, 13, 0, 1])),
)


def png(path: Path, pixels: np.ndarray, *tags: Chunk, **options: bytes) -> Path:
    Image.fromarray(pixels).save(path, **options)
    add_to_png(path, tags)
    return path


def wide_avif(path: Path, pixels: np.ndarray) -> Path:
    Image.fromarray(pixels).save(path, quality=90)
    set_cicp(path, 9, 16)
    return path


@pytest.mark.parametrize("strip", [False, True])
def test_numbers_go_between_avif_and_png(tmp_path: Path, samples: Make, strip: bool, copy: Copy) -> None:
    source = wide_avif(tmp_path / "a.avif", samples(32, 40, 3))
    assert copy(source, tmp_path / "b.avif", strip) == () and read_cicp(tmp_path / "b.avif") == (9, 16)
    assert copy(source, tmp_path / "b.png", strip) == () and read_colours(tmp_path / "b.png") == (WIDE,)
    assert copy(tmp_path / "b.png", tmp_path / "c.avif", strip) == () and read_cicp(tmp_path / "c.avif") == (9, 16)


@pytest.mark.parametrize("lossless", [False, True])
@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("channels", [3, 4])
def test_pixels_are_the_same_with_numbers_and_without(
    tmp_path: Path, samples: Make, channels: int, bits: int, lossless: bool
) -> None:
    """By a reader that checks the whole structure of the file, and believes its matrix."""
    rows = samples(64, 48, channels, bits, seed=1)
    for name, metadata in (("plain", Metadata(xmp=b"<x/>")), ("tagged", Metadata(xmp=b"<x/>", colour=(WIDE,)))):
        path = tmp_path / f"{name}.avif"
        with ImageSink(path, 48, 64, channels, bits, Encoding(lossless=lossless), metadata) as sink:
            sink.write_rows(rows)
    with Image.open(tmp_path / "plain.avif") as plain, Image.open(tmp_path / "tagged.avif") as tagged:
        assert np.array_equal(np.asarray(plain), np.asarray(tagged)) and tagged.info["xmp"] == b"<x/>"
    assert read_cicp(tmp_path / "tagged.avif") == (9, 16)


@pytest.mark.parametrize("written", ["jpg", "webp", "tif"])
def test_what_has_no_place_is_said_to_be_lost(tmp_path: Path, samples: Make, written: str, copy: Copy) -> None:
    pixels, target = samples(32, 40, 3), tmp_path / f"b.{written}"
    for source, lost in (
        (png(tmp_path / "a.png", pixels, LINEAR, WIDE), "gAMA, cICP"),
        (png(tmp_path / "b.png", pixels, LINEAR), "gAMA"),
        (wide_avif(tmp_path / "c.avif", pixels), "cICP"),
    ):
        for strip in (False, True):
            (note,) = copy(source, target, strip)
            assert f"cannot hold {lost}, which define its colours" in note


def test_nothing_is_said_where_nothing_is_lost(tmp_path: Path, samples: Make, copy: Copy) -> None:
    pixels = samples(32, 40, 3)
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    for name, tags, options in (
        ("srgb", SRGB, {}),
        ("said", (LINEAR, Chunk(b"sRGB", b"\0")), {}),
        ("profile", (LINEAR,), {"icc_profile": profile}),
    ):
        source = png(tmp_path / f"{name}.png", pixels, *tags, **options)
        for written in ("jpg", "webp", "tif", "avif"):
            assert copy(source, tmp_path / f"b.{written}") == ()
    # What can be shown by its numbers needs no gamma; without them it does.
    assert copy(png(tmp_path / "a.png", pixels, LINEAR, WIDE), tmp_path / "b.avif") == ()
    assert len(copy(png(tmp_path / "a.png", pixels, LINEAR), tmp_path / "b.avif")) == 1


def grey_profile(gamma: float) -> bytes:
    """The smallest there is: a white point and a curve."""
    white = b"XYZ \0\0\0\0" + struct.pack(">3i", 63_190, 65_536, 54_061)
    curve = b"curv\0\0\0\0" + struct.pack(">IH", 1, round(gamma * 256)) + b"\0\0"
    table = struct.pack(">I", 2) + struct.pack(">4sII4sII", b"wtpt", 156, len(white), b"kTRC", 156 + len(white), 14)
    size = 128 + len(table) + len(white) + len(curve)
    head = struct.pack(">I4sI4s4s4s", size, b"lcms", 0x02400000, b"mntr", b"GRAY", b"XYZ ") + bytes(12) + b"acsp"
    head += bytes(28) + struct.pack(">3i", 63_190, 65_536, 54_061)
    return head.ljust(128, b"\0") + table + white + curve


@pytest.mark.parametrize(
    ("written", "channels", "bits"), [("webp", 1, 8), ("webp", 2, 8), ("avif", 1, 8), ("avif", 2, 8), ("avif", 1, 16)]
)
def test_grey_by_its_own_profile_looks_the_same_where_there_is_no_grey(
    tmp_path: Path, written: str, channels: int, bits: int
) -> None:
    most = 2**bits - 1
    rows = np.full((32, 64, channels), most, np.uint8 if bits == 8 else np.uint16)
    rows[..., 0] = np.repeat(np.linspace(0.1, 1, 4) * most, 16).round()
    metadata, path = Metadata(icc=grey_profile(1.0)), tmp_path / f"a.{written}"
    with ImageSink(path, 64, 32, channels, bits, Encoding(quality=100), metadata) as sink:
        sink.write_rows(rows)
    assert sink.notes[-1].endswith("does not support grey: the image was converted to sRGB with its profile")
    # Light in proportion to the number, by sRGB's curve.
    light = np.linspace(0.1, 1, 4)
    expected = (1.055 * light ** (1 / 2.4) - 0.055) * 255
    with Image.open(path) as image:
        assert image.info["icc_profile"][16:20] == b"RGB "
        seen = np.asarray(image.convert("RGB"))[16, 8::16].astype(int)
    assert np.abs(seen - expected[:, None]).max() <= 2


@pytest.mark.parametrize("written", ["png", "jpg", "tif"])
def test_grey_keeps_its_profile_where_there_is_grey(tmp_path: Path, samples: Make, written: str) -> None:
    profile = grey_profile(1.8)
    with ImageSink(tmp_path / f"a.{written}", 40, 30, 1, 8, metadata=Metadata(icc=profile)) as sink:
        sink.write_rows(samples(30, 40, 1))
    with open_image(tmp_path / f"a.{written}") as again:
        assert sink.notes == () and again.channels == 1 and again.metadata.icc == profile


@pytest.mark.parametrize("depth", [10, 12])
def test_avif_keeps_its_depth_and_rounding_names_it(tmp_path: Path, samples: Make, depth: int, copy: Copy) -> None:
    with ImageSink(tmp_path / "a.avif", 40, 30, 3, 16, metadata=Metadata(depth=depth)) as sink:
        sink.write_rows(samples(30, 40, 3, 16))
    assert sink.notes == ()
    with open_image(tmp_path / "a.avif") as again:
        assert again.metadata.depth == depth and again.bits == 16
    assert copy(tmp_path / "a.avif", tmp_path / "b.avif") == () == copy(tmp_path / "a.avif", tmp_path / "b.png")
    with open_image(tmp_path / "b.avif") as again:
        assert again.metadata.depth == depth
    assert copy(tmp_path / "a.avif", tmp_path / "b.jpg") == (f"JPEG holds 8 bits: the {depth}-bit image was rounded",)

"""Camera's tags in TIFF files of every layout, and blocks that are damaged."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from PIL import ExifTags, Image

from redline.upscale.images.exif import add_to_tiff, read_from_tiff, resolution, upright
from redline.upscale.images.metadata import Metadata
from redline.upscale.images.sink import ImageSink
from redline.upscale.images.source import open_image

Make = Callable[..., np.ndarray]


def tags(order: str) -> Image.Exif:
    exif = Image.Exif()
    exif.endian = order
    exif[ExifTags.Base.Artist] = "Somebody with a long name"
    exif[ExifTags.Base.Make] = "abc"
    photo = exif.get_ifd(ExifTags.IFD.Exif)
    photo[ExifTags.Base.FNumber], photo[ExifTags.Base.ISOSpeedRatings] = 2.8, 400
    photo[ExifTags.Base.ExifImageWidth] = 7
    return exif


def load(block: bytes) -> tuple[Image.Exif, dict[int, Any]]:
    exif = Image.Exif()
    exif.load(block)
    return exif, exif.get_ifd(ExifTags.IFD.Exif)


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("big", [False, True])
@pytest.mark.parametrize("theirs", ["<", ">"])
def test_a_block_is_added_and_read_in_every_layout(
    tmp_path: Path, samples: Make, order: str, big: bool, theirs: Any
) -> None:
    path, made = tmp_path / "a.tif", samples(33, 21, 3)
    tifffile.imwrite(
        path, made, photometric="rgb", byteorder=theirs, bigtiff=big, rowsperstrip=5, software=False, metadata=None
    )
    with path.open("ab") as file:
        file.write(b"odd")
    assert read_from_tiff(path) == {}
    add_to_tiff(path, tags(order).tobytes(), b"captions of an image", 21, 33)
    assert np.array_equal(tifffile.imread(path), made)
    found = read_from_tiff(path)
    exif, photo = load(found["exif"])
    assert found["iptc"] == b"captions of an image"
    assert exif[ExifTags.Base.Artist] == "Somebody with a long name" and exif[ExifTags.Base.Make] == "abc"
    assert float(photo[ExifTags.Base.FNumber]) == pytest.approx(2.8)
    assert photo[ExifTags.Base.ISOSpeedRatings] == 400 and photo[ExifTags.Base.ExifImageWidth] == 21
    with tifffile.TiffFile(path) as file:
        assert file.pages.first.tags["Artist"].value == "Somebody with a long name"
        assert file.pages.first.tags[33723].value == b"captions of an image"
        assert file.pages.first.tags["ExifTag"].value["ISOSpeedRatings"] == 400


def test_a_damaged_block_breaks_nothing(tmp_path: Path, samples: Make) -> None:
    whole = tags("<").tobytes()
    generator = np.random.default_rng()
    for _ in range(300):
        damaged = bytearray(whole)
        for at in generator.integers(6, len(whole), 4):
            damaged[at] = generator.integers(0, 256)
        block = bytes(damaged[: generator.integers(0, len(damaged) + 1)])
        assert len(upright(block)) == len(block)
        resolution(block)
        (tmp_path / "block.tif").write_bytes(block[6:])
        read_from_tiff(tmp_path / "block.tif")
    made = samples(12, 10, 3)
    for suffix in ("tif", "jpg", "png", "webp", "avif"):
        with ImageSink(tmp_path / f"a.{suffix}", 10, 12, 3, 8, metadata=Metadata(exif=b"Exif\0\0junk")) as sink:
            sink.write_rows(made)
        with open_image(tmp_path / f"a.{suffix}") as source:
            assert source.rows(0, 12).shape == made.shape


def test_what_tifffile_notes_of_the_small_picture_is_left_out(tmp_path: Path, samples: Make) -> None:
    artist = [(315, "s", 0, "Somebody", True)]
    tifffile.imwrite(tmp_path / "a.tif", samples(10, 12, 3), photometric="rgb", extratags=artist)
    tifffile.imwrite(tmp_path / "b.tif", samples(10, 12, 3), photometric="rgb", description="a bird", metadata=None)
    for name, described in (("a", None), ("b", "a bird")):
        with (
            open_image(tmp_path / f"{name}.tif") as source,
            ImageSink(tmp_path / "large.tif", 24, 20, 3, 8, metadata=source.metadata) as sink,
        ):
            sink.write_rows(samples(20, 24, 3))
        with tifffile.TiffFile(tmp_path / "large.tif") as file:
            tags = file.pages.first.tags
            assert (tags["ImageDescription"].value if "ImageDescription" in tags else None) == described
            assert described or tags["Artist"].value == "Somebody"
            assert file.series[0].shape == (20, 24, 3)

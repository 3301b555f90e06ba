"""Every kind of file gives the samples that other readers see in it, upright, and in bands as well as whole."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from PIL import Image, ImageOps

from redline.upscale.images.formats import ImageError
from redline.upscale.images.sink import Encoding, ImageSink
from redline.upscale.images.source import open_image
from redline.upscale.images.vips import load_vips

Make = Callable[..., np.ndarray]
Read = Callable[..., np.ndarray]


def test_png_of_every_kind(tmp_path: Path, samples: Make, read_whole: Read) -> None:
    rgba = samples(41, 53, 4)
    rgb = Image.fromarray(rgba[..., :3])
    palette = rgb.quantize(17)
    kinds = {
        "grey": (Image.fromarray(rgba[..., 0]), "L", {}),
        "grey and alpha": (Image.merge("LA", [Image.fromarray(rgba[..., band]) for band in (0, 3)]), "LA", {}),
        "rgb": (rgb, "RGB", {}),
        "rgba": (Image.fromarray(rgba), "RGBA", {}),
        "palette": (palette, "RGB", {}),
        "palette with transparency": (palette, "RGBA", {"transparency": bytes([0, 128, 255])}),
        "one bit": (rgb.convert("1"), "L", {}),
        "a transparent colour": (rgb, "RGBA", {"transparency": tuple(int(value) for value in rgba[3, 5, :3])}),
    }
    for name, (image, mode, options) in kinds.items():
        path = tmp_path / "a.png"
        image.save(path, **options)
        expected = np.asarray(Image.open(path).convert(mode)).reshape(41, 53, -1)
        found = read_whole(path)
        assert found.dtype == np.uint8 and np.array_equal(found, expected), name


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
@pytest.mark.parametrize("byteorder", ["<", ">"])
def test_tiff_of_16_bits(tmp_path: Path, samples: Make, channels: int, byteorder: Any) -> None:
    made = samples(37, 29, channels, bits=16)
    extra = ["unassalpha"] if channels in (2, 4) else None
    tifffile.imwrite(
        tmp_path / "a.tif",
        made if channels > 1 else made[..., 0],
        photometric="rgb" if channels > 2 else "minisblack",
        planarconfig="contig" if channels > 1 else None,
        extrasamples=extra,
        byteorder=byteorder,
        bigtiff=channels == 4,
        compression="deflate",
    )
    with open_image(tmp_path / "a.tif") as source:
        assert (source.width, source.height, source.channels, source.bits) == (29, 37, channels, 16)
        assert source.channels == channels
        assert np.array_equal(source.rows(0, 37), made)


def test_grey_png_of_16_bits(tmp_path: Path, samples: Make, read_whole: Read) -> None:
    made = samples(19, 31, 1, bits=16)
    Image.fromarray(made[..., 0]).save(tmp_path / "a.png")
    assert np.array_equal(read_whole(tmp_path / "a.png"), made)


def test_other_tiffs(tmp_path: Path, samples: Make, read_whole: Read) -> None:
    made = samples(40, 51, 3)
    tifffile.imwrite(tmp_path / "planar.tif", made.transpose(2, 0, 1), photometric="rgb", planarconfig="separate")
    assert np.array_equal(read_whole(tmp_path / "planar.tif"), made)
    tifffile.imwrite(tmp_path / "white.tif", made[..., 0], photometric="miniswhite")
    assert np.array_equal(read_whole(tmp_path / "white.tif")[..., 0], 255 - made[..., 0])
    tifffile.imwrite(tmp_path / "tiles.tif", made, photometric="rgb", tile=(16, 32), compression="deflate")
    assert np.array_equal(read_whole(tmp_path / "tiles.tif"), made)
    Image.fromarray(made).convert("1").save(tmp_path / "fax.tif", compression="group4")
    assert set(np.unique(read_whole(tmp_path / "fax.tif"))) == {0, 255}


def test_luma_and_chroma_are_read_from_jpeg_and_refused_without(tmp_path: Path, read_whole: Read) -> None:
    ramp = np.linspace(0, 255, 64, dtype=np.uint8)
    made = np.stack(np.broadcast_arrays(ramp[None], ramp[:, None], np.uint8(90)), -1)
    Image.fromarray(made).convert("YCbCr").save(tmp_path / "raw.tif")
    with pytest.raises(ImageError, match=r"YCbCr without JPEG compression.*save it as RGB first\.$"):
        open_image(tmp_path / "raw.tif")
    vips = load_vips().Image.new_from_array(made).copy(interpretation="srgb")
    vips.tiffsave(str(tmp_path / "jpeg.tif"), compression="jpeg", Q=85)
    with tifffile.TiffFile(tmp_path / "jpeg.tif") as file:
        assert file.pages[0].photometric == 6
    assert np.abs(read_whole(tmp_path / "jpeg.tif").astype(int) - made).mean() < 4


def test_colour_that_was_premultiplied_in_a_tiff_is_given_back_its_strength(
    tmp_path: Path, samples: Make, read_whole: Read
) -> None:
    made = samples(40, 51, 4, bits=16)
    made[..., 3] |= 0x4000
    strength = made[..., 3:] / 65535
    weak = np.concatenate([(made[..., :3] * strength).round().astype(np.uint16), made[..., 3:]], axis=2)
    tifffile.imwrite(tmp_path / "a.tif", weak, photometric="rgb", extrasamples=["assocalpha"])
    assert np.abs(read_whole(tmp_path / "a.tif").astype(int) - made).max() <= 4


def test_lossy_formats_agree_with_another_decoder(tmp_path: Path, samples: Make, read_whole: Read) -> None:
    made = Image.fromarray(samples(67, 83, 3))
    kinds = {
        "a.jpg": {"quality": 92},
        "b.jpg": {"progressive": True},
        "a.webp": {},
        "a.avif": {"subsampling": "4:4:4"},
    }
    for name, options in kinds.items():
        made.save(tmp_path / name, **options)
        expected = np.asarray(Image.open(tmp_path / name).convert("RGB")).astype(int)
        assert np.abs(read_whole(tmp_path / name) - expected).max() <= 3, name


def test_deep_avif_reaches_white(tmp_path: Path, read_whole: Read) -> None:
    made = np.zeros((16, 24, 3), np.uint16)
    made[:, 12:] = 65535
    with ImageSink(tmp_path / "a.avif", 24, 16, 3, 16, Encoding(lossless=True)) as sink:
        sink.write_rows(made)
    assert np.array_equal(read_whole(tmp_path / "a.avif"), made)


@pytest.mark.parametrize("profiled", [False, True])
def test_cmyk_becomes_srgb_and_says_so(tmp_path: Path, samples: Make, profiled: bool) -> None:
    made = Image.fromarray(samples(40, 50, 3)).convert("CMYK")
    path = tmp_path / "a.jpg"
    if profiled:
        # libvips' own CMYK profile stands for a printer's.
        image = (
            load_vips()
            .Image.new_from_memory(np.asarray(made).tobytes(), 50, 40, 4, "uchar")
            .copy(interpretation="cmyk")
        )
        image.icc_transform("cmyk", input_profile="cmyk").jpegsave(str(path), Q=95)
    else:
        made.save(path, quality=95)
    with open_image(path) as source:
        assert source.channels == 3
        said = "with its profile" if profiled else "a generic profile"
        assert [said in note for note in source.notes] == [True]
        profile = source.metadata.icc
        assert profile is not None and profile[16:20] == b"RGB "
        assert source.rows(0, 40).std() > 5


def test_cmyk_paper_white_and_full_black(tmp_path: Path, read_whole: Read) -> None:
    inks = np.zeros((32, 32, 4), np.uint8)
    inks[16:, :, 3] = 255
    tifffile.imwrite(tmp_path / "a.tif", inks, photometric="separated")
    found = read_whole(tmp_path / "a.tif")
    assert found[:16].min() > 245 and found[16:].max() < 70


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "tif"])
def test_every_orientation_stands_upright(tmp_path: Path, samples: Make, orientation: int, suffix: str) -> None:
    path = tmp_path / f"a.{suffix}"
    made = Image.fromarray(samples(40, 27, 3))
    exif = Image.Exif()
    exif[0x0112] = orientation
    options: dict[str, Any] = (
        {"lossless": True} if suffix == "webp" else {"quality": 100, "subsampling": 0} if suffix == "jpg" else {}
    )
    made.save(path, exif=exif, **options)
    expected = np.asarray(ImageOps.exif_transpose(Image.open(path)))
    for random_access in (False, True):
        with open_image(path, random_access=random_access) as source:
            assert (source.height, source.width) == expected.shape[:2]
            bands = [source.rows(top, min(top + 9, source.height)) for top in range(0, source.height, 9)]
        assert np.abs(np.concatenate(bands).astype(int) - expected).max() <= (2 if suffix == "jpg" else 0)


@pytest.mark.parametrize("orientation", [2, 3, 6])
def test_a_picture_too_tall_for_any_buffer_is_turned(tmp_path: Path, samples: Make, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(samples(3001, 50, 3)).save(tmp_path / "a.png", exif=exif)
    expected = np.asarray(ImageOps.exif_transpose(Image.open(tmp_path / "a.png")))
    with open_image(tmp_path / "a.png") as source:
        bands = [source.rows(top, min(top + 100, source.height)) for top in range(0, source.height, 100)]
    assert np.array_equal(np.concatenate(bands), expected)


@pytest.mark.parametrize(("height", "width"), [(1, 1), (1, 5000), (5000, 1), (2, 3)])
@pytest.mark.parametrize("suffix", ["png", "jpg", "webp", "tif", "avif", "gif"])
def test_extreme_shapes(tmp_path: Path, read_whole: Read, height: int, width: int, suffix: str) -> None:
    made = np.full((height, width, 3), (200, 90, 30), np.uint8)
    Image.fromarray(made).save(tmp_path / f"a.{suffix}")
    found = read_whole(tmp_path / f"a.{suffix}")
    assert found.shape == made.shape and np.abs(found.astype(int) - made).max() <= 6


@pytest.mark.parametrize("suffix", ["png", "jpg", "tif"])
def test_bands_that_share_rows_equal_the_whole(tmp_path: Path, samples: Make, read_whole: Read, suffix: str) -> None:
    path = tmp_path / f"a.{suffix}"
    Image.fromarray(samples(1013, 61, 3)).save(path)
    whole = read_whole(path)
    generator = np.random.default_rng()
    with open_image(path) as source:
        top = bottom = 0
        while bottom < source.height:
            top = int(generator.integers(top, bottom + 1))
            bottom = min(source.height, max(bottom - 20, top + 1) + int(generator.integers(0, 300)))
            assert np.array_equal(source.rows(top, bottom), whole[top:bottom]), (top, bottom)
        with pytest.raises(ImageError, match="upwards"):
            source.rows(0, 5)
    with open_image(path, random_access=True) as source:
        for top in generator.permutation(1000)[:20]:
            assert np.array_equal(source.rows(top, top + 13), whole[top : top + 13])


def test_rows_may_be_skipped_and_must_exist(tmp_path: Path, samples: Make, read_whole: Read) -> None:
    Image.fromarray(samples(500, 20, 3)).save(tmp_path / "a.png")
    with open_image(tmp_path / "a.png") as source:
        assert np.array_equal(source.rows(400, 410), read_whole(tmp_path / "a.png")[400:410])
        for top, bottom in ((-1, 3), (499, 501), (420, 420)):
            with pytest.raises(ImageError, match="500 rows"):
                source.rows(top, bottom)
    with pytest.raises(ImageError, match="is closed"):
        source.rows(410, 411)


def test_each_band_may_be_read_by_another_thread(tmp_path: Path, samples: Make, read_whole: Read) -> None:
    Image.fromarray(samples(640, 300, 3)).save(tmp_path / "a.jpg")
    bands: list[np.ndarray] = []
    with open_image(tmp_path / "a.jpg") as source:
        for top in range(0, 640, 80):
            thread = threading.Thread(target=lambda top=top: bands.append(source.rows(top, top + 80)))
            thread.start()
            thread.join()
    assert np.array_equal(np.concatenate(bands), read_whole(tmp_path / "a.jpg"))


def test_names_with_brackets_spaces_and_bytes_that_are_no_text(tmp_path: Path, samples: Make, read_whole: Read) -> None:
    made = samples(20, 30, 3)
    for name in ("a[page=3].png", "ein Bild, schön.png", b"\xff\xfe.png".decode("utf-8", "surrogateescape")):
        with ImageSink(tmp_path / name, 30, 20, 3, 8) as sink:
            sink.write_rows(made)
        assert np.array_equal(read_whole(tmp_path / name), made)

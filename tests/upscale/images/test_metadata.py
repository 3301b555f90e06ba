"""Profile, camera's tags, XMP, IPTC and resolution reach the new file in every format, and nothing in them is stale."""

import functools
import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import ExifTags, Image, ImageCms, PngImagePlugin

from redline.upscale.images.exif import resolution, upright
from redline.upscale.images.metadata import Metadata, unwrap, wrap
from redline.upscale.images.sink import ImageSink
from redline.upscale.images.source import open_image

Make = Callable[..., np.ndarray]

WRITTEN = ["png", "jpg", "webp", "tif", "avif"]
IPTC = b"\x1c\x02\x50\0\x07Someone"
XMP = b"""<?xpacket begin="" id="W5M0MpCehiHzreSzNTczkc9d"?><x:xmpmeta xmlns:x="adobe:ns:meta/">
<rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#"><rdf:Description rdf:about=""
xmlns:tiff="http://ns.adobe.com/tiff/1.0/" tiff:Orientation="6" tiff:ImageWidth="40" xmlns:xmp="x" xmp:Rating="4">
<exif:PixelYDimension>30</exif:PixelYDimension></rdf:Description></rdf:RDF></x:xmpmeta><?xpacket end="w"?>"""


@functools.cache
def profile() -> bytes:
    return ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()


def camera_tags(orientation: int = 6) -> Image.Exif:
    exif = Image.Exif()
    exif[ExifTags.Base.Make] = "A camera"
    exif[ExifTags.Base.Orientation] = orientation
    exif[ExifTags.Base.DateTime] = "2024:02:03 04:05:06"
    photo, gps = exif.get_ifd(ExifTags.IFD.Exif), exif.get_ifd(ExifTags.IFD.GPSInfo)
    photo[ExifTags.Base.ExposureTime] = 0.01
    photo[ExifTags.Base.LensModel] = "A lens with quite a long name"
    photo[ExifTags.Base.ExifImageWidth], photo[ExifTags.Base.ExifImageHeight] = 40, 30
    gps[1], gps[2] = "N", (51.0, 30.0, 12.5)
    return exif


def a_photo(path: Path, samples: Make) -> Path:
    """40 × 30 pixels that lie on their side, with everything that a file can carry."""
    texts = PngImagePlugin.PngInfo()
    texts.add_itxt("XML:com.adobe.xmp", XMP.decode())
    texts.add_text("parameters", "a budgie, highly detailed")
    options = {
        ".png": {"dpi": (300, 300), "pnginfo": texts},
        ".jpg": {"dpi": (300, 300), "xmp": XMP},
        ".webp": {"xmp": XMP},
        ".avif": {"xmp": XMP},
        ".tif": {"dpi": (300, 300)},
    }[path.suffix]
    exif = camera_tags()
    if path.suffix == ".tif":
        exif[ExifTags.Base.XMLPacket] = XMP
        options["exif"] = exif.tobytes()
    if path.suffix in (".webp", ".avif"):
        exif[ExifTags.Base.XResolution] = exif[ExifTags.Base.YResolution] = 300.0
        exif[ExifTags.Base.ResolutionUnit] = 2
    Image.fromarray(samples(30, 40, 3)).save(path, icc_profile=profile(), **{"exif": exif, **options})
    return path


def enlarge(source: Path, target: Path, strip: bool = False) -> tuple[str, ...]:
    with open_image(source) as opened:
        rows = opened.rows(0, opened.height).repeat(2, 0).repeat(2, 1)
        with ImageSink(
            target, rows.shape[1], rows.shape[0], opened.channels, opened.bits, metadata=opened.metadata, strip=strip
        ) as sink:
            sink.write_rows(rows)
    return sink.notes


@pytest.mark.parametrize("written", WRITTEN)
@pytest.mark.parametrize("read", WRITTEN)
def test_everything_goes_from_any_format_to_any_other(tmp_path: Path, samples: Make, read: str, written: str) -> None:
    source, target = a_photo(tmp_path / f"a.{read}", samples), tmp_path / f"b.{written}"
    notes = enlarge(source, target)
    assert len(notes) == (read == "png" and written != "png")
    with Image.open(target) as image:
        assert image.size == (60, 80)
        assert image.info["icc_profile"] == profile()
        exif = image.getexif()
        photo, gps = exif.get_ifd(ExifTags.IFD.Exif), exif.get_ifd(ExifTags.IFD.GPSInfo)
    assert exif[ExifTags.Base.Make] == "A camera" and exif[ExifTags.Base.DateTime] == "2024:02:03 04:05:06"
    assert exif.get(ExifTags.Base.Orientation, 1) == 1
    assert photo[ExifTags.Base.LensModel] == "A lens with quite a long name"
    assert float(photo[ExifTags.Base.ExposureTime]) == pytest.approx(0.01)
    assert (photo[ExifTags.Base.ExifImageWidth], photo[ExifTags.Base.ExifImageHeight]) == (60, 80)
    assert gps[1] == "N" and [float(part) for part in gps[2]] == [51.0, 30.0, 12.5]
    with open_image(target) as again:
        xmp = again.metadata.xmp
        assert again.metadata.dpi == (300.0, 300.0)
    assert xmp is not None and b'xmp:Rating="4"' in xmp
    assert b'tiff:Orientation="1" tiff:ImageWidth="60"' in xmp and b"<exif:PixelYDimension>80<" in xmp


@pytest.mark.parametrize("written", WRITTEN)
def test_strip_leaves_the_profile_alone(tmp_path: Path, samples: Make, written: str) -> None:
    source = a_photo(tmp_path / "a.png", samples)
    assert enlarge(source, tmp_path / f"b.{written}", strip=True) == ()
    with open_image(tmp_path / f"b.{written}") as again:
        assert again.metadata == Metadata(icc=profile())
    content = (tmp_path / f"b.{written}").read_bytes()
    assert b"A camera" not in content and b"xmpmeta" not in content and b"budgie" not in content


@pytest.mark.parametrize("written", WRITTEN)
def test_nothing_is_made_up_for_a_picture_that_carries_nothing(tmp_path: Path, samples: Make, written: str) -> None:
    Image.fromarray(samples(30, 40, 3)).save(tmp_path / "a.png")
    enlarge(tmp_path / "a.png", tmp_path / f"b.{written}")
    with open_image(tmp_path / f"b.{written}") as again:
        assert again.metadata == Metadata()


def test_texts_of_a_png_reach_a_png(tmp_path: Path, samples: Make) -> None:
    enlarge(a_photo(tmp_path / "a.png", samples), tmp_path / "b.png")
    with Image.open(tmp_path / "b.png") as image:
        assert image.info["parameters"] == "a budgie, highly detailed"


def test_captions_are_found_among_the_resources_of_photoshop() -> None:
    other = b"8BIM\x04\x0c\x05names\0\0\0\x03abc\0"
    block = wrap(IPTC)
    assert unwrap(block) == unwrap(block[:14] + other + block[14:]) == unwrap(IPTC) == IPTC
    assert unwrap(block[:14] + other) is None
    for end in range(len(block)):
        unwrap(block[:end])


def test_iptc_reaches_jpeg_and_tiff_and_a_note_says_where_it_cannot(tmp_path: Path, samples: Make) -> None:
    for suffix in WRITTEN:
        with ImageSink(tmp_path / f"a.{suffix}", 40, 30, 3, 8, metadata=Metadata(iptc=IPTC)) as sink:
            sink.write_rows(samples(30, 40, 3))
        with open_image(tmp_path / f"a.{suffix}") as again:
            found = again.metadata.iptc
        assert found == (IPTC if suffix in ("jpg", "tif") else None)
        assert [("IPTC" in note) for note in sink.notes] == ([] if suffix in ("jpg", "tif") else [True])


def test_xmp_that_is_too_long_for_jpeg_is_left_out_with_a_note(tmp_path: Path, samples: Make) -> None:
    for suffix in ("png", "jpg"):
        metadata = Metadata(icc=profile(), xmp=XMP + b" " * 70_000)
        with ImageSink(tmp_path / f"a.{suffix}", 40, 30, 3, 8, metadata=metadata) as sink:
            sink.write_rows(samples(30, 40, 3))
        assert len(sink.notes) == (suffix == "jpg")
        with open_image(tmp_path / f"a.{suffix}") as again:
            assert (again.metadata.xmp is None) == (suffix == "jpg") and again.metadata.icc == profile()


def test_the_thumbnail_of_the_old_picture_is_left_out(tmp_path: Path, samples: Make) -> None:
    thumbnail = io.BytesIO()
    Image.new("RGB", (16, 12), "red").save(thumbnail, "JPEG")
    exif = camera_tags()
    first = exif.tobytes()
    # The second directory follows the first, and holds where the thumbnail lies and how long it is.
    body = bytearray(first[6:])
    little = body[:2] == b"II"
    order = "little" if little else "big"
    count = int.from_bytes(body[8:10], order)
    end = 10 + 12 * count
    body[end : end + 4] = len(body).to_bytes(4, order)
    start = len(body) + 2 + 3 * 12 + 4
    for tag, kind, value in ((0x0103, 3, 6), (0x0201, 4, start), (0x0202, 4, len(thumbnail.getvalue()))):
        if tag == 0x0103:
            body += (3).to_bytes(2, order)
        number = value.to_bytes(2, order) + b"\0\0" if kind == 3 else value.to_bytes(4, order)
        body += tag.to_bytes(2, order) + kind.to_bytes(2, order) + (1).to_bytes(4, order) + number
    body += bytes(4) + thumbnail.getvalue()
    Image.fromarray(samples(30, 40, 3)).save(tmp_path / "a.jpg", exif=first[:6] + bytes(body))
    assert thumbnail.getvalue() in (tmp_path / "a.jpg").read_bytes()
    for suffix in WRITTEN:
        enlarge(tmp_path / "a.jpg", tmp_path / f"b.{suffix}")
        content = (tmp_path / f"b.{suffix}").read_bytes()
        assert b"A camera" in content and thumbnail.getvalue()[100:] not in content


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("order", ["<", ">"])
def test_upright_changes_the_orientation_alone(orientation: int, order: str) -> None:
    exif = camera_tags(orientation)
    exif.endian = order
    block = exif.tobytes()
    changed = upright(block)
    assert len(changed) == len(block) and sum(a != b for a, b in zip(block, changed, strict=True)) == (orientation != 1)
    again = Image.Exif()
    again.load(changed)
    assert again[ExifTags.Base.Orientation] == 1 and again[ExifTags.Base.Make] == "A camera"


def test_resolution_per_centimetre_is_put_in_inches() -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.XResolution], exif[ExifTags.Base.YResolution], exif[ExifTags.Base.ResolutionUnit] = (
        100.0,
        50.0,
        3,
    )
    assert resolution(exif.tobytes()) == (254.0, 127.0)
    assert resolution(camera_tags().tobytes()) is None


def test_uneven_resolution_turns_with_the_picture(tmp_path: Path, samples: Make) -> None:
    Image.fromarray(samples(30, 40, 3)).save(tmp_path / "a.jpg", exif=camera_tags(6), dpi=(200, 100))
    with open_image(tmp_path / "a.jpg") as source:
        assert source.metadata.dpi == (100.0, 200.0)


@pytest.mark.parametrize("said", [None, 72, 300])
def test_a_png_says_no_more_of_its_resolution_than_its_source(tmp_path: Path, samples: Make, said: int | None) -> None:
    options, made = {} if said is None else {"dpi": (said, said)}, samples(12, 17, 3)
    Image.fromarray(made).save(tmp_path / "a.png", **options)
    for name in ("a.png", "b.png"):  # what was written is read and written again
        with open_image(tmp_path / name) as source:
            assert source.metadata.dpi == (None if said is None else pytest.approx((said, said), abs=0.02))
            with ImageSink(tmp_path / f"{name[0]}1.png", 17, 12, 3, 8, metadata=source.metadata) as sink:
                sink.write_rows(source.rows(0, 12))
        (tmp_path / f"{name[0]}1.png").replace(tmp_path / "b.png")
        with Image.open(tmp_path / "b.png") as written:
            written.load()  # which checks the sums of all chunks
            assert written.info.get("dpi") == (None if said is None else pytest.approx((said, said), abs=0.02))
            assert np.array_equal(np.asarray(written), made)

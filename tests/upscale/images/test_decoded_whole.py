"""BMP, Netpbm, TGA, JPEG 2000 and HEIC: read exactly, with depth, alpha and profile; damage is one sentence."""

import random
import re
import struct
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image, ImageCms

from redline.upscale.images.formats import ImageError
from redline.upscale.images.source import open_image

from .conftest import make_samples, read_all


def save(path: Path, samples: np.ndarray, **options: object) -> Path:
    Image.fromarray(samples[..., 0] if samples.shape[-1] == 1 else samples).save(path, **options)
    return path


@pytest.mark.parametrize(
    ("name", "channels", "bits"),
    [
        ("a.bmp", 3, 8),
        ("a.bmp", 1, 8),
        ("a.tga", 3, 8),
        ("a.tga", 4, 8),
        ("a.tga", 1, 8),
        ("a.jp2", 3, 8),
        ("a.jp2", 4, 8),
        ("a.jp2", 1, 16),
        ("a.j2k", 3, 8),
        ("a.ppm", 3, 8),
        ("a.pgm", 1, 8),
    ],
)
def test_samples_are_read_as_they_are(name: str, channels: int, bits: int, tmp_path: Path) -> None:
    samples = make_samples(33, 47, channels, bits, seed=1)
    path = save(tmp_path / name, samples)
    with open_image(path) as source:
        assert (source.width, source.height, source.channels, source.bits) == (47, 33, channels, bits)
        assert not source.notes and source.channels == channels
        # In bands, as they are read for tiles.
        bands = [source.rows(top, min(top + 10, 33)) for top in range(0, 33, 10)]
    assert np.array_equal(np.concatenate(bands), samples)


def netpbm(kind: int, width: int, height: int, most: int | None, data: bytes) -> bytes:
    numbers = [f"{width} {height}", *([] if most is None else [str(most)])]
    return "\n".join([f"P{kind}", "# a comment", *numbers, ""]).encode() + data


def test_every_kind_of_netpbm(tmp_path: Path) -> None:
    deep = make_samples(5, 9, 3, 16, seed=2)
    path = tmp_path / "a.pnm"
    path.write_bytes(netpbm(6, 9, 5, 65535, deep.astype(">u2").tobytes()))
    assert np.array_equal(read_all(path), deep)
    path.write_bytes(netpbm(3, 9, 5, 65535, " ".join(map(str, deep.flat)).encode()))
    assert np.array_equal(read_all(path), deep)
    path.write_bytes(netpbm(2, 3, 1, 15, b"0 5 # five\n15"))
    assert read_all(path).flatten().tolist() == [0, 85, 255]
    path.write_bytes(netpbm(5, 3, 1, 1023, struct.pack(">3H", 0, 341, 1023)))
    assert read_all(path).flatten().tolist() == [0, 21845, 65535]
    # A bit that is set is black.
    for kind, data in ((1, b"1 0 1\n010"), (4, b"\xa0\x40")):
        path.write_bytes(netpbm(kind, 3, 2, None, data))
        assert read_all(path).flatten().tolist() == [0, 255, 0, 255, 0, 255]


def jpeg2000_of_ffmpeg(samples: np.ndarray, format: str) -> bytes:
    encoder = av.CodecContext.create("jpeg2000", "w")
    encoder.width, encoder.height, encoder.pix_fmt = samples.shape[1], samples.shape[0], format
    encoder.time_base, encoder.options = Fraction(1, 25), {"pred": "dwt53"}
    frame = av.VideoFrame.from_ndarray(samples, format=format)
    return b"".join(bytes(packet) for packet in [*encoder.encode(frame), *encoder.encode(None)])


def test_colour_of_16_bits_in_jpeg_2000_is_not_rounded(tmp_path: Path) -> None:
    deep = make_samples(33, 47, 3, 16, seed=3)
    (tmp_path / "a.jp2").write_bytes(jpeg2000_of_ffmpeg(deep, "rgb48le"))
    with open_image(tmp_path / "a.jp2") as source:
        assert source.bits == 16 and np.array_equal(source.rows(0, 33), deep)


def test_the_profile_of_jpeg_2000_is_kept(tmp_path: Path) -> None:
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    data = save(tmp_path / "a.jp2", make_samples(8, 8, seed=4)).read_bytes()
    own = re.search(rb"\0\0\0\x0fcolr.{7}", data, re.DOTALL)
    assert own is not None
    box = struct.pack(">I4s3s", 8 + 3 + len(profile), b"colr", b"\2\0\0") + profile
    header = data.index(b"jp2h") - 4
    length = struct.unpack(">I", data[header : header + 4])[0] - len(own[0]) + len(box)
    data = data[:header] + struct.pack(">I", length) + data[header + 4 :].replace(own[0], box)
    (tmp_path / "a.jp2").write_bytes(data)
    with open_image(tmp_path / "a.jp2") as source:
        assert source.metadata.icc == profile


def test_palettes_become_rgb(tmp_path: Path) -> None:
    samples = make_samples(8, 8, seed=5) // 64 * 64
    for name in ("a.bmp", "a.tga"):
        Image.fromarray(samples).quantize(200).save(tmp_path / name)
        assert np.abs(read_all(tmp_path / name).astype(int) - samples).max() < 64


def heic(side: int) -> bytes:
    """One image of HEVC in the boxes that a camera writes."""
    encoder = av.CodecContext.create("libx265", "w")
    encoder.width = encoder.height = side
    encoder.pix_fmt, encoder.time_base = "yuv420p", Fraction(1, 25)
    encoder.options = {"x265-params": "log-level=none:keyint=1:info=0"}
    frame = av.VideoFrame.from_ndarray(np.full((side * 3 // 2, side), 128, np.uint8), format="yuv420p")
    stream = b"".join(bytes(packet) for packet in [*encoder.encode(frame), *encoder.encode(None)])
    units = [unit.rstrip(b"\0") for unit in re.split(rb"\x00\x00\x00?\x01", stream) if unit]
    sets = [unit for unit in units if unit[0] >> 1 in (32, 33, 34)]
    payload = b"".join(struct.pack(">I", len(unit)) + unit for unit in units if unit[0] >> 1 < 32)
    profile = next(unit for unit in sets if unit[0] >> 1 == 33)[3:15]
    arrays = b"".join(bytes([0x80 | unit[0] >> 1]) + struct.pack(">HH", 1, len(unit)) + unit for unit in sets)
    settings = b"\1" + profile + b"\xf0\0\xfc\xfd\xf8\xf8\0\0\x0f" + bytes([len(sets)]) + arrays
    properties = box(b"ipco", box(b"hvcC", settings), box(b"ispe", bytes(4), struct.pack(">II", side, side)))

    def meta(offset: int) -> bytes:
        place = struct.pack(">HHHHHII", 0x4400, 1, 1, 0, 1, offset, len(payload))
        item = box(b"infe", b"\2\0\0\0", b"\0\1\0\0hvc1\0")
        parts = [
            box(b"hdlr", bytes(8), b"pict", bytes(13)),
            box(b"pitm", bytes(4), b"\0\1"),
            box(b"iloc", bytes(4), place),
            box(b"iinf", bytes(4), b"\0\1", item),
            box(b"iprp", properties, box(b"ipma", bytes(4), struct.pack(">IHBBB", 1, 1, 2, 0x81, 2))),
        ]
        return box(b"meta", bytes(4), *parts)

    start = box(b"ftyp", b"heic\0\0\0\0mif1heic")
    return start + meta(len(start) + len(meta(0)) + 8) + box(b"mdat", payload)


def box(kind: bytes, *parts: bytes) -> bytes:
    return struct.pack(">I4s", 8 + sum(map(len, parts)), kind) + b"".join(parts)


def test_heic_is_read_or_what_is_missing_is_said(tmp_path: Path) -> None:
    (tmp_path / "a.heic").write_bytes(heic(64))
    with open_image(tmp_path / "a.heic") as source:
        assert (source.format, source.width, source.height, source.bits) == ("heic", 64, 64, 8)
        try:
            assert np.ptp(source.rows(0, 64)) < 4
        except ImageError as error:
            assert "no decoder for HEVC" in str(error) and "install a libvips with libheif and libde265" in str(error)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["a.bmp", "a.tga", "a.jp2", "deep.jp2", "a.ppm", "a.pgm"])
def test_damaged_files_end_in_one_sentence(name: str, tmp_path: Path) -> None:
    samples = make_samples(20, 30, 1 if name == "a.pgm" else 3, seed=6)
    if name == "deep.jp2":
        whole = jpeg2000_of_ffmpeg(make_samples(20, 30, 3, 16, seed=6), "rgb48le")
    else:
        whole = save(tmp_path / name, samples).read_bytes()
    chance = random.Random(6)
    for number in range(100):
        data = bytearray(whole)
        if number % 4 == 0:
            del data[chance.randrange(30, len(data)) :]
        for _ in range(3):
            data[chance.randrange(2, min(100, len(data)))] = chance.randrange(256)
        (tmp_path / name).write_bytes(data)
        try:
            with open_image(tmp_path / name, max_pixels=10_000) as source:
                source.rows(0, source.height)
        except ImageError as error:
            assert str(error).endswith(".") and "\n" not in str(error)
    (tmp_path / name).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ImageError, match="cannot read"):
        read_all(tmp_path / name)


def test_the_limit_of_pixels_comes_before_decoding(tmp_path: Path) -> None:
    (tmp_path / "a.ppm").write_bytes(netpbm(6, 999_999, 999_999, 255, b""))
    with pytest.raises(ImageError, match="more than the limit of 1,000,000,000"):
        open_image(tmp_path / "a.ppm")

"""Files that are damaged, mean or not what they say: one sentence each, and never rows that are made up."""

import errno
import os
import re
import struct
import threading
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image

from redline.upscale.images.formats import ImageError
from redline.upscale.images.sink import ImageSink
from redline.upscale.images.source import open_image
from redline.upscale.images.vips import load_vips

Make = Callable[..., np.ndarray]
Read = Callable[..., np.ndarray]

KINDS = {
    "baseline.jpg": {"quality": 90},
    "progressive.jpg": {"quality": 90, "progressive": True},
    "plain.png": {},
    "lossy.webp": {},
    "lossless.webp": {"lossless": True},
    "plain.tif": {},
    "lzw.tif": {"compression": "tiff_lzw"},
    "plain.avif": {"speed": 10},
    "plain.gif": {},
}


def refusal(path: Path, **options: bool) -> str:
    """The sentence with which a file is refused, at its header or on the way down."""
    with pytest.raises(ImageError) as caught, open_image(path, **options) as source:
        for top in range(0, source.height, 50):
            source.rows(max(0, top - 10), min(source.height, top + 50))
    sentence = str(caught.value)
    assert path.name in sentence and sentence.endswith(".") and "\n" not in sentence
    return sentence


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("random_access", [False, True])
def test_cut_short_anywhere(tmp_path: Path, samples: Make, kind: str, random_access: bool) -> None:
    path = tmp_path / kind
    Image.fromarray(samples(160, 200, 3)).save(path, **KINDS[kind])
    whole = path.read_bytes()
    for part in (12, 40, *(int(len(whole) * share) for share in (0.1, 0.5, 0.9)), len(whole) - 20):
        path.write_bytes(whole[:part])
        refusal(path, random_access=random_access)


def test_interlaced_png_cut_short(tmp_path: Path, samples: Make) -> None:
    made = samples(160, 200, 3)
    path = tmp_path / "a.png"
    load_vips().Image.new_from_array(made).pngsave(str(path), interlace=True)
    path.write_bytes(path.read_bytes()[:-5000])
    assert "damaged or truncated" in refusal(path)


def test_a_png_overwritten_in_the_middle(tmp_path: Path, samples: Make) -> None:
    path = tmp_path / "a.png"
    Image.fromarray(samples(160, 200, 3)).save(path)
    data = bytearray(path.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 60] = bytes(60)
    path.write_bytes(data)
    refusal(path)


def test_a_damaged_tile_of_a_tiff_is_no_grey_square(tmp_path: Path, samples: Make) -> None:
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, samples(256, 256, 3), photometric="rgb", tile=(64, 64), compression="deflate")
    with tifffile.TiffFile(path) as file:
        begin = file.pages[0].dataoffsets[5]
    data = bytearray(path.read_bytes())
    data[begin : begin + 20] = b"\xff" * 20
    path.write_bytes(data)
    refusal(path)


def test_jpeg_data_that_ends_before_the_picture_does_is_no_grey_half(tmp_path: Path, samples: Make) -> None:
    path = tmp_path / "a.jpg"
    Image.fromarray(samples(160, 200, 3)).save(path)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2] + b"\xff\xd9")
    refusal(path)


def test_a_source_that_failed_goes_on_failing(tmp_path: Path, samples: Make) -> None:
    path = tmp_path / "a.jpg"
    Image.fromarray(samples(160, 200, 3)).save(path)
    path.write_bytes(path.read_bytes()[:-3000])
    with open_image(path) as source:
        for _ in range(2):
            with pytest.raises(ImageError, match="premature end"):
                source.rows(0, 160)


def test_harmless_flaws_of_a_jpeg_are_read_with_a_note(tmp_path: Path, samples: Make, read_whole: Read) -> None:
    path = tmp_path / "a.jpg"
    Image.fromarray(samples(100, 60, 3)).save(path)
    data, expected = path.read_bytes(), read_whole(path)
    revision, table = data.index(b"JFIF") + 5, data.index(b"\xff\xdb")
    flawed = {
        "JFIF revision": data[:revision] + b"\x05\x09" + data[revision + 2 :],
        "extraneous bytes": data[:table] + b"\0\x11\x22" + data[table:],
    }
    for remark, content in flawed.items():
        path.write_bytes(content)
        with open_image(path) as source:
            assert source.notes == ()
            assert np.array_equal(np.concatenate([source.rows(0, 40), source.rows(40, 100)]), expected)
            assert len(source.notes) == 1 and remark in source.notes[0]


def test_empty_text_and_unknown_files(tmp_path: Path) -> None:
    for content, said in (
        (b"", "is empty"),
        (b"not an image", "PNG, JPEG"),
        (b"BM" + bytes(60), "unknown image format"),
    ):
        path = tmp_path / "a.jpg"
        path.write_bytes(content)
        assert said in refusal(path)
    (tmp_path / "a.heic").write_bytes(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(100))
    assert "cannot read" in refusal(tmp_path / "a.heic")
    tifffile.imwrite(tmp_path / "a.tif", np.zeros((8, 8), np.uint8))
    (tmp_path / "a.tif").rename(tmp_path / "a.NEF")
    assert "raw file" in refusal(tmp_path / "a.NEF")


def test_folders_missing_files_pipes_and_forbidden_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "is a folder" in refusal(tmp_path)
    assert "does not exist" in refusal(tmp_path / "nothing.png")
    os.mkfifo(tmp_path / "pipe.png")
    assert "is not a file" in refusal(tmp_path / "pipe.png")
    path = tmp_path / "a.png"
    Image.new("RGB", (3, 3)).save(path)

    def forbid(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("builtins.open", forbid)
    assert "Permission denied" in refusal(path)


@pytest.mark.parametrize(("suffix", "form"), [(".jpg", "png"), (".png", "jpeg"), (".tif", "webp"), ("", "gif")])
def test_the_content_decides_and_a_note_says_so(tmp_path: Path, samples: Make, suffix: str, form: str) -> None:
    path = tmp_path / f"a{suffix}"
    Image.fromarray(samples(9, 14, 3)).save(path, format=form.upper())
    with open_image(path) as source:
        assert source.format == form and source.rows(0, 9).shape == (9, 14, 3)
        assert [suffix in note and form in note.lower() for note in source.notes] == [True]


def png_of_one_row(path: Path, width: int, height: int) -> Path:
    """Its header promises the rest."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    ends = chunk(b"IDAT", zlib.compress(bytes(3 * width + 1))) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + ends)
    return path


def test_a_picture_of_600_megapixels_is_no_bomb(tmp_path: Path) -> None:
    with open_image(png_of_one_row(tmp_path / "large.png", 30_000, 20_000)) as source:
        assert (source.width, source.height) == (30_000, 20_000)


def test_a_bomb_is_refused_before_it_goes_off(tmp_path: Path) -> None:
    path = png_of_one_row(tmp_path / "bomb.png", 60_000, 60_000)
    with pytest.raises(ImageError, match=re.escape("3,600,000,000 pixels (60,000 × 60,000)") + ".*--max-pixels"):
        open_image(path)
    with open_image(path, max_pixels=3_600_000_000) as source:
        assert source.width == 60_000
        with pytest.raises(ImageError, match="damaged or truncated"):
            source.rows(0, 64)


@pytest.mark.parametrize("suffix", ["gif", "webp", "png", "avif"])
def test_of_an_animation_the_first_frame(tmp_path: Path, read_whole: Read, suffix: str) -> None:
    path = tmp_path / f"a.{suffix}"
    colours = [(250, 10, 10), (10, 250, 10), (10, 10, 250)]
    first, *others = [Image.new("RGB", (40, 30), colour) for colour in colours]
    first.save(path, save_all=True, append_images=others, duration=100)
    with open_image(path) as source:
        assert source.height == 30 and len(source.notes) == 1
        assert re.search("first frame" if suffix == "avif" else "first of 3 frames", source.notes[0])
        assert np.abs(source.rows(0, 30)[..., :3].astype(int) - colours[0]).max() <= 6


def test_of_several_pages_the_first(tmp_path: Path, samples: Make) -> None:
    pages = np.stack([samples(20, 30, 1)[..., 0] for _ in range(4)])
    tifffile.imwrite(tmp_path / "a.tif", pages, photometric="minisblack")
    with open_image(tmp_path / "a.tif") as source:
        assert source.notes == ("only the first of 4 pages is used",)
        assert np.array_equal(source.rows(0, 20)[..., 0], pages[0])


def test_samples_that_are_no_picture(tmp_path: Path, samples: Make) -> None:
    path = tmp_path / "a.tif"
    for made, said in (
        (samples(20, 30, 3).astype(np.float32), "of type float"),
        (samples(20, 30, 3).astype(np.uint32), "of type uint"),
        (samples(20, 30, 6), "6 channels"),
    ):
        tifffile.imwrite(path, made, photometric="rgb", planarconfig="contig")
        assert said in refusal(path)
    Image.fromarray(samples(20, 30, 3)).convert("LAB").save(path)
    assert "Lab colour" in refusal(path)


def test_a_bad_file_does_not_disturb_a_good_one_beside_it(tmp_path: Path, samples: Make, read_whole: Read) -> None:
    made = samples(300, 200, 3)
    with ImageSink(tmp_path / "good.png", 200, 300, 3, 8) as sink:
        sink.write_rows(made)
    (tmp_path / "bad.png").write_bytes((tmp_path / "good.png").read_bytes()[:-20_000])
    failures: list[str] = []
    results: list[bool] = []

    def read_bad() -> None:
        for _ in range(20):
            try:
                read_whole(tmp_path / "bad.png")
            except ImageError as error:
                failures.append(str(error))

    thread = threading.Thread(target=read_bad)
    thread.start()
    for _ in range(20):
        results.append(np.array_equal(read_whole(tmp_path / "good.png"), made))
    thread.join()
    assert all(results) and len(failures) == 20 and all("bad.png" in failure for failure in failures)

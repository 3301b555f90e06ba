"""Texts and colours of PNG files are written as they were read, byte for byte, whatever they hold."""

import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, PngImagePlugin

from redline.upscale.images import formats
from redline.upscale.images.png import Chunk, add_to_png, read_colours, read_texts, xmp_chunk

Make = Callable[..., np.ndarray]
Copy = Callable[..., tuple[str, ...]]

JAPANESE = "夕焼けの写真"
XMP = f'<x:xmpmeta xmlns:x="adobe:ns:meta/"><title>{JAPANESE}</title></x:xmpmeta>'.encode()
TEXTS = (
    Chunk(b"tEXt", b"Author\0Andr\xe9"),
    Chunk(b"iTXt", b"Title\0\0\0ja\0\xe9\xa1\x8c\0" + JAPANESE.encode()),
    Chunk(b"iTXt", b"Comment\0\1\0\0\0" + zlib.compress(JAPANESE.encode() * 20)),
    Chunk(b"zTXt", b"parameters\0\0" + zlib.compress(b"a budgie")),
)
COLOURS = (
    Chunk(b"gAMA", struct.pack(">I", 100_000)),
    Chunk(b"cHRM", struct.pack(">8I", 31_270, 32_900, 70_800, 29_200, 17_000, 79_700, 13_100, 4_600)),
    Chunk(b"cICP", bytes([9, 16, 0, 1])),
    Chunk(b"cLLI", struct.pack(">2I", 10_000_000, 4_000_000)),
)


def with_chunks(path: Path, chunks: tuple[Chunk, ...], pixels: np.ndarray) -> Path:
    Image.fromarray(pixels).save(path)
    add_to_png(path, chunks)
    return path


def test_texts_and_colours_reach_a_png_as_they_are(tmp_path: Path, samples: Make, copy: Copy) -> None:
    pixels = samples(12, 17, 3)
    source = with_chunks(tmp_path / "a.png", (*COLOURS, *TEXTS, xmp_chunk(XMP)), pixels)
    assert copy(source, tmp_path / "b.png") == ()
    assert read_texts(tmp_path / "b.png") == TEXTS and read_colours(tmp_path / "b.png") == COLOURS
    assert (tmp_path / "b.png").read_bytes().count(b"XML:com.adobe.xmp") == 1
    with Image.open(tmp_path / "b.png") as image:
        # Another reader finds them before it decodes a pixel, and the sums of all chunks are right.
        assert image.info["xmp"] == XMP and image.info["Author"] == "André" and image.info["Title"] == JAPANESE
        assert image.info["Comment"] == JAPANESE * 20 and image.info["parameters"] == "a budgie"
        assert image.info["gamma"] == 1.0
        image.load()
        assert np.array_equal(np.asarray(image), pixels)


def test_stripped_of_texts_but_not_of_colours(tmp_path: Path, samples: Make, copy: Copy) -> None:
    source = with_chunks(tmp_path / "a.png", (*COLOURS, *TEXTS, xmp_chunk(XMP)), samples(12, 17, 3))
    assert copy(source, tmp_path / "b.png", strip=True) == ()
    assert read_texts(tmp_path / "b.png") == () and read_colours(tmp_path / "b.png") == COLOURS
    assert JAPANESE.encode() not in (tmp_path / "b.png").read_bytes()


def test_texts_behind_the_pixels_are_found(tmp_path: Path, samples: Make, copy: Copy) -> None:
    late = PngImagePlugin.PngInfo()
    late.add(b"tEXt", b"Author\0Andr\xe9", after_idat=True)
    Image.fromarray(samples(12, 17, 3)).save(tmp_path / "a.png", pnginfo=late)
    copy(tmp_path / "a.png", tmp_path / "b.png")
    with Image.open(tmp_path / "b.png") as image:
        assert image.info["Author"] == "André"


def test_a_chunk_that_is_longer_than_the_file_is_none(tmp_path: Path, samples: Make) -> None:
    """Nothing is set aside for what a damaged file claims."""
    Image.fromarray(samples(12, 17, 3)).save(tmp_path / "a.png")
    whole = (tmp_path / "a.png").read_bytes()
    (tmp_path / "a.png").write_bytes(whole[:-12] + struct.pack(">I4s", 0x7FFFFFFF, b"tEXt") + whole[-12:])
    assert read_texts(tmp_path / "a.png") == ()


@pytest.mark.parametrize("piece", [1, 7, 64, 10_000])
def test_insertion_moves_the_rest_whatever_the_pieces(
    tmp_path: Path, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "_PIECE_BYTES", piece)
    whole = bytes(range(256))
    for at, data in ((0, b"abc"), (100, b"x" * 50), (256, b"end"), (33, b"")):
        (tmp_path / "a").write_bytes(whole)
        with open(tmp_path / "a", "r+b") as file:
            formats.insert(file, at, data)
        assert (tmp_path / "a").read_bytes() == whole[:at] + data + whole[at:]

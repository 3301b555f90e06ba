"""Images are written whole or not at all, and large ones without holding them in memory."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from PIL import Image

from redline.files.partial import is_partial
from redline.upscale.images.formats import ImageError
from redline.upscale.images.sink import Encoding, ImageSink

Make = Callable[..., np.ndarray]
Read = Callable[..., np.ndarray]


def write(path: Path, rows: np.ndarray, step: int = 13, **options: Any) -> tuple[str, ...]:
    height, width, channels = rows.shape
    bits = 8 * rows.dtype.itemsize
    with ImageSink(path, width, height, channels, bits, **options) as sink:
        for top in range(0, height, step):
            sink.write_rows(rows[top : top + step])
    return sink.notes


@pytest.mark.parametrize("memory_limit_bytes", [2**30, 0], ids=["memory", "scratch"])
@pytest.mark.parametrize("channels", [1, 2, 3, 4])
@pytest.mark.parametrize("suffix", ["png", "tif"])
@pytest.mark.parametrize("bits", [8, 16])
def test_lossless_formats_give_back_what_was_written(
    tmp_path: Path, samples: Make, read_whole: Read, suffix: str, channels: int, bits: int, memory_limit_bytes: int
) -> None:
    made, path = samples(57, 43, channels, bits), tmp_path / "deep" / f"a.{suffix}"
    assert write(path, made, memory_limit_bytes=memory_limit_bytes) == ()
    assert np.array_equal(read_whole(path), made)
    if suffix == "tif":
        with tifffile.TiffFile(path) as file:
            page = file.pages.first
            assert (page.bitspersample, page.samplesperpixel, page.shape[:2]) == (bits, channels, (57, 43))
            assert len(page.extrasamples) == (channels in (2, 4))
    if bits == 8:
        assert np.array_equal(np.asarray(Image.open(path)).reshape(made.shape), made)
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize("suffix", ["webp", "avif"])
@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_lossless_webp_and_avif(tmp_path: Path, samples: Make, read_whole: Read, suffix: str, channels: int) -> None:
    made, path = samples(57, 43, channels), tmp_path / f"a.{suffix}"
    if channels in (2, 4):
        made[:20, ..., -1] = 0
    write(path, made, encoding=Encoding(lossless=True))
    found = read_whole(path)
    # Neither has grey, so it comes back three times.
    expected = made if channels > 2 else made[..., [0, 0, 0, *([1] if channels == 2 else [])]]
    assert np.array_equal(found, expected)


def test_quality_is_followed(tmp_path: Path, samples: Make, read_whole: Read) -> None:
    made = samples(120, 90, 3)
    for suffix in ("jpg", "webp", "avif"):
        sizes, errors = [], []
        for quality in (30, 95):
            write(tmp_path / f"a.{suffix}", made, encoding=Encoding(quality=quality))
            sizes.append((tmp_path / f"a.{suffix}").stat().st_size)
            errors.append(np.abs(read_whole(tmp_path / f"a.{suffix}").astype(int) - made).mean())
        assert sizes[0] < sizes[1] and errors[0] > errors[1] and errors[1] < 5, suffix


@pytest.mark.parametrize(("suffix", "levels"), [("webp", 255), ("avif", 4095)])
def test_16_bits_are_rounded_to_the_nearest(tmp_path: Path, read_whole: Read, suffix: str, levels: int) -> None:
    values = np.random.default_rng().integers(0, 65536, (40, 40, 1), dtype=np.uint16)
    values[0, :2, 0] = 0, 65535
    notes = write(tmp_path / f"a.{suffix}", np.repeat(values, 3, axis=2), encoding=Encoding(lossless=True))
    assert len(notes) == 1 and "rounded" in notes[0]
    found = read_whole(tmp_path / f"a.{suffix}")[..., :1] / (255 if levels == 255 else 65535)
    assert np.abs(found - values / 65535).max() <= 0.51 / levels


def test_large_tiffs_are_big_tiffs(
    tmp_path: Path, samples: Make, read_whole: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("redline.upscale.images.sink._BIG_TIFF_BYTES", 1000)
    made = samples(50, 40, 3)
    write(tmp_path / "a.tif", made)
    assert (tmp_path / "a.tif").read_bytes()[:4] == b"II+\0"
    assert np.array_equal(read_whole(tmp_path / "a.tif"), made)


def test_long_names_work(tmp_path: Path, samples: Make, read_whole: Read) -> None:
    made, path = samples(9, 14, 3), tmp_path / ("ü" * 120 + ".png")
    write(path, made)
    assert np.array_equal(np.asarray(Image.open(path)), made)
    umask = os.umask(0)
    os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask


def test_nothing_but_a_hidden_file_is_there_before_the_end(tmp_path: Path, samples: Make) -> None:
    made, path = samples(30, 20, 3), tmp_path / "a.png"
    path.write_bytes(b"what was there before")
    for memory_limit_bytes, files in ((2**30, 1), (0, 2)):
        sink = ImageSink(path, 20, 30, 3, 8, memory_limit_bytes=memory_limit_bytes)
        sink.write_rows(made[:20])
        hidden = [tmp_path / name for name in os.listdir(tmp_path) if name != "a.png"]
        assert len(hidden) == files and all(is_partial(name) and str(os.getpid()) in name.name for name in hidden)
        assert path.read_bytes() == b"what was there before" and not is_partial(path)
        sink.abort()
        sink.abort()
        assert os.listdir(tmp_path) == ["a.png"]
        with pytest.raises(ImageError, match="finished or aborted"):
            sink.write_rows(made[20:])


def test_an_exception_inside_leaves_nothing(tmp_path: Path, samples: Make) -> None:
    with (
        pytest.raises(KeyboardInterrupt),
        ImageSink(tmp_path / "a.png", 20, 30, 3, 8, memory_limit_bytes=0) as sink,
    ):
        sink.write_rows(samples(10, 20, 3))
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == []


def test_too_few_too_many_and_wrong_rows(tmp_path: Path, samples: Make) -> None:
    with (
        pytest.raises(ImageError, match="10 of its 30 rows"),
        ImageSink(tmp_path / "a.png", 20, 30, 3, 8) as sink,
    ):
        sink.write_rows(samples(10, 20, 3))
    for rows, said in (
        (samples(31, 20, 3), "31 were given"),
        (samples(5, 21, 3), "do not fit"),
        (samples(5, 20, 3, 16), "uint16"),
    ):
        with pytest.raises(ImageError, match=said), ImageSink(tmp_path / "a.png", 20, 30, 3, 8) as sink:
            sink.write_rows(rows)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("call", "code"), [("replace", errno.EACCES), ("fsync", errno.ENOSPC)])
def test_a_target_that_cannot_be_replaced(
    tmp_path: Path, samples: Make, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    (tmp_path / "a.png").write_bytes(b"what was there before")

    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(ImageError, match=rf"cannot write '.*a\.png': {os.strerror(code)}\."):
        write(tmp_path / "a.png", samples(10, 10, 3))
    assert os.listdir(tmp_path) == ["a.png"] and (tmp_path / "a.png").read_bytes() == b"what was there before"


def test_a_read_only_folder_is_told_before_any_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbid(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "open", forbid)
    with pytest.raises(ImageError, match="Read-only file system"):
        ImageSink(tmp_path / "a.png", 10, 10, 3, 8)


def test_folders_and_files_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "a.png").mkdir()
    with pytest.raises(ImageError, match="it is a folder"):
        ImageSink(tmp_path / "a.png", 10, 10, 3, 8)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ImageError, match="cannot write"):
        ImageSink(tmp_path / "file" / "b.png", 10, 10, 3, 8)


def test_a_picture_that_the_disk_cannot_hold_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="TiB of temporary space are needed"):
        ImageSink(tmp_path / "a.png", 90_000_000, 90_000_000, 3, 8)
    assert os.listdir(tmp_path) == []


FULL_DISK = """
import os, resource, sys
from pathlib import Path
import numpy as np
from redline.upscale.images.sink import Encoding
from redline.upscale.images.formats import ImageError
from redline.upscale.images.sink import ImageSink
folder = Path(sys.argv[1])
rows = np.random.default_rng().integers(0, 256, (200, 300, 3), dtype=np.uint8)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
for suffix in ("png", "jpg", "webp", "tif", "avif"):
    for memory_limit_bytes in (2**30, 0):
        try:
            with ImageSink(
                folder / f"a.{suffix}", 300, 200, 3, 8, Encoding(lossless=True), memory_limit_bytes=memory_limit_bytes
            ) as sink:
                sink.write_rows(rows)
            sys.exit(f"{suffix} was written")
        except ImageError as error:
            assert str(error) == f"cannot write {str(folder / f'a.{suffix}')!r}: File too large.", error
        assert os.listdir(folder) == [], os.listdir(folder)
"""


def test_when_the_disk_is_full_there_is_one_sentence_and_no_file(tmp_path: Path) -> None:
    """A limit on the size of files stands for a full disk: every write beyond it really fails."""
    child = subprocess.run([sys.executable, "-c", FULL_DISK, tmp_path], capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr


MEMORY = """
import sys, threading, time
from pathlib import Path
import numpy as np
from redline.upscale.images.sink import ImageSink
from redline.upscale.images.source import open_image
folder, width, height = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
peak = [0]
def held():
    # Pages of a mapped file can be dropped at any time; anonymous ones are what an image must not fill.
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))
def watch():
    while True:
        peak[0] = max(peak[0], held())
        time.sleep(0.01)
with ImageSink(folder / "warm.png", 10, 10, 3, 8) as sink:
    sink.write_rows(np.zeros((10, 10, 3), np.uint8))
before = held()
threading.Thread(target=watch, daemon=True).start()
pattern = np.random.default_rng().integers(0, 256, (64, width, 3), dtype=np.uint8) // 16 * 16
for suffix in sys.argv[4:]:
    with ImageSink(folder / f"a.{suffix}", width, height, 3, 8, memory_limit_bytes=2**20) as sink:
        for top in range(0, height, 64):
            sink.write_rows(pattern[: min(64, height - top)])
    with open_image(folder / f"a.{suffix}") as source:
        for top in range(0, height, 64):
            rows = source.rows(max(0, top - 16), min(height, top + 64))
            assert suffix == "jpg" or np.array_equal(rows[-1], pattern[(min(height, top + 64) - 1) % 64])
print((peak[0] - before) / (width * height * 3))
"""


def share_held_in_memory(folder: Path, width: int, height: int, *suffixes: str) -> float:
    command = [sys.executable, "-c", MEMORY, str(folder), str(width), str(height), *suffixes]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    return float(child.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_a_tall_picture_is_written_and_read_without_holding_it(tmp_path: Path) -> None:
    assert share_held_in_memory(tmp_path, 600, 30_000, "jpg", "tif") < 0.25


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_120_megapixels_are_written_and_read_without_holding_them(tmp_path: Path) -> None:
    assert share_held_in_memory(tmp_path, 6_000, 20_000, "png", "jpg", "tif") < 0.25

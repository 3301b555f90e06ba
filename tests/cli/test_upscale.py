"""`redline upscale` as it is typed: what it prints, what it leaves, and its exit codes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from PIL import Image

from redline.models.drct import Drct, DrctConfig, save_drct
from redline.upscale.journal import Journal
from redline.upscale.session import Upscaling
from redline.upscale.tasks import Task

from .conftest import Seen


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("weights") / "tiny.safetensors"
    save_drct(Drct(DrctConfig.of(2, 1, width=12, growth=6, features=4, window=4)), path)
    return path


@pytest.fixture(autouse=True)
def no_measured_ceilings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The shipped plan goes by measured rates where there are some; here by what the hardware says."""
    monkeypatch.setenv("REDLINE_CACHE", str(tmp_path / "no ceilings"))


@pytest.fixture
def upscale(command: Callable[..., Seen], weights: Path) -> Callable[..., Seen]:
    return lambda *arguments: command("upscale", *arguments, "-w", weights)


def save(path: Path, height: int = 20, width: int = 30) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)).save(path)
    return path


def size(path: Path) -> tuple[int, int]:
    with Image.open(path) as image:
        image.load()
        return image.size


def test_one_photo(upscale: Callable[..., Seen], tmp_path: Path) -> None:
    save(tmp_path / "photo.jpg")
    seen = upscale("photo.jpg")
    assert seen.code == 0 and seen.out.split()[:4] == ["photo-x2.jpg", "60", "×", "40"]
    assert size(tmp_path / "photo-x2.jpg") == (60, 40)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["photo-x2.jpg", "photo.jpg"]


def test_a_second_path_that_is_not_there_is_the_output(upscale: Callable[..., Seen], tmp_path: Path) -> None:
    save(tmp_path / "photo.jpg")
    seen = upscale("photo.jpg", "large.png")
    assert seen.code == 0 and seen.out.startswith("large.png  60 × 40") and size(tmp_path / "large.png") == (60, 40)
    assert "writing to 'large.png'" in seen.err
    # Repeated, the command must not enlarge its own result.
    before = sorted(tmp_path.iterdir())
    again = upscale("photo.jpg", "large.png")
    assert again.code == 2 and "'large.png' exists: to overwrite it, use --out large.png" in again.err
    assert sorted(tmp_path.iterdir()) == before


def test_a_bad_file_among_named_ones(
    upscale: Callable[..., Seen], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "a.bmp")
    (tmp_path / "notes.txt").write_text("no image")
    seen = upscale("a.bmp", "notes.txt", "absent.png")
    assert seen.code == 1 and seen.out.startswith("a-x2.png  60 × 40") and "1 upscaled, 2 failed" in seen.err
    assert (
        "cannot read 'absent.png': it does not exist." in seen.err and "'notes.txt': unknown image format" in seen.err
    )
    # What cannot be done is said before a model is read.
    monkeypatch.setattr(Upscaling, "__init__", None)
    seen = upscale("absent.png", "notes.txt", "-o", "out")
    assert seen.code == 1 and "0 upscaled, 2 failed" in seen.err
    seen = upscale("a.bmp", "-o", "a.bmp")
    assert seen.code == 2 and "the output 'a.bmp' is the source image; choose another output." in seen.err


def test_a_folder_with_a_bad_file(upscale: Callable[..., Seen], tmp_path: Path) -> None:
    for name in ("a.png", "deep/b.png", "deep/c.png"):
        save(tmp_path / "in" / name)
    (tmp_path / "in" / "deep" / "bad.png").write_text("no image")
    seen = upscale("in", "-o", "out", "--format", "webp", "--json")
    assert seen.code == 1
    rows = {Path(row["task"]["source"]).name: row for row in seen.json()}
    assert sorted(rows) == ["a.png", "b.png", "bad.png", "c.png"] and "unknown image format" in rows["bad.png"]["error"]
    assert sorted(str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*.webp")) == [
        "a.webp",
        "deep/b.webp",
        "deep/c.webp",
    ]
    again = upscale("in", "-o", "out", "--format", "webp", "--resume")
    assert again.code == 1 and again.out == "" and "3 already complete, 1 failed" in again.err
    # A damaged file is a failure with exit code 1 even if it is the only one.
    assert upscale("in/deep/bad.png").code == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["absent.png"], "cannot read 'absent.png': it does not exist"),
        (["photo.png", "--tile", "huge"], "--tile must be auto, a whole number"),
        (["photo.png", "--tile", "20"], "a tile of 20 is too small: use 80 or more."),
        (["photo.png", "--tile", "76x256"], "a tile of 76 is too small: use 80 or more."),
        (["photo.png", "--tile", "96", "--memory", "100KiB"], "not enough: a tile of 96 × 96 needs"),
        (["photo.png", "--scale", "4"], "is for ×2, not ×4"),
        (["photo.png", "--precision", "fp7"], "unknown precision 'fp7'"),
        (["photo.png", "--preset", "warp"], "unknown preset"),
        (["photo.png", "--plan", "absent.toml"], "cannot read the plan"),
        (["photo.png", "--memory", "1KiB"], "not enough"),
        (["photo.png", "--memory", "much"], "much"),
        (["photo.png", "--format", "bmp"], "choose png, jpeg"),
        (["photo.png", "--quality", "0"], "between 1 and 100"),
        (["photo.png", "--device", "warp"], "warp"),
        (["photo.png", "--tile-batch", "0"], "tile_batch = 0 must be a whole number (at least 1)."),
        (["photo.png", "--codec", "foo"], "unknown codec 'foo': choose h264"),
        (["photo.png", "--crf", "99"], "crf must be between 0 and 63 for av1, not 99"),
        (["photo.png", "--crf", "nan"], "crf must be between 0 and 63 for av1, not nan"),
        (["photo.png", "--codec", "hevc", "--crf", "52"], "crf must be between 0 and 51 for hevc, not 52."),
        (["photo.png", "--codec", "ffv1", "--crf", "5"], "ffv1 has no crf"),
        (["."], "no image or video found"),
    ],
)
def test_bad_input(upscale: Callable[..., Seen], arguments: list[str], sentence: str, tmp_path: Path) -> None:
    if arguments != ["."]:
        save(tmp_path / "photo.png", 100, 120)  # a tile is no larger than the largest image
    before = sorted(tmp_path.iterdir())
    seen = upscale(*arguments)
    assert seen.code == 2 and seen.out == "" and sentence in seen.err and "Traceback" not in seen.err
    assert sorted(tmp_path.iterdir()) == before


def test_what_is_complete_is_skipped_for_a_single_file_too(upscale: Callable[..., Seen], tmp_path: Path) -> None:
    save(tmp_path / "photo.png")
    assert upscale("photo.png", "-o", "large.png", "--resume").code == 0
    again = upscale("photo.png", "-o", "large.png", "--resume")
    assert again.code == 0 and again.out == "" and "1 already complete" in again.err
    # Without being asked to, a single image is done again, and nothing is noted beside it.
    save(tmp_path / "other" / "photo.png")
    assert "large.png" in upscale("photo.png", "-o", "large.png").out
    assert upscale("other/photo.png").code == 0
    assert sorted(path.name for path in (tmp_path / "other").iterdir()) == ["photo-x2.png", "photo.png"]


def test_files_that_a_folder_leaves_out_or_cannot_name_are_told(upscale: Callable[..., Seen], tmp_path: Path) -> None:
    save(tmp_path / "in" / "a.png")
    save(tmp_path / "in" / "a.gif")
    (tmp_path / "in" / "notes.txt").touch()
    seen = upscale("in", "-o", "out")
    assert seen.code == 1 and len(seen.out.splitlines()) == 1 and size(tmp_path / "out" / "a.png") == (60, 40)
    assert "skipped 1 file in 'in' without the suffix of an image or video: notes.txt" in seen.err
    assert "would both become" in seen.err
    assert "1 upscaled, 1 failed" in seen.err


def test_weights_of_another_model(command: Callable[..., Seen], tmp_path: Path) -> None:
    save(tmp_path / "photo.png")
    torch.save({"params": {"body.0.rdb1.conv1.weight": torch.zeros(1)}}, tmp_path / "other.pth")
    seen = command("upscale", "photo.png", "-w", "other.pth")
    assert seen.code == 2 and "RRDBNet" in seen.err
    missing = command("upscale", "photo.png", "-w", "absent.pth")
    assert missing.code == 2 and "absent.pth" in missing.err


def make_film(path: Path) -> None:
    with av.open(str(path), "w") as video:
        video.metadata["title"] = "A secret"
        stream = video.add_stream("ffv1", rate=5)
        stream.width, stream.height, stream.pix_fmt = 32, 24, "yuv420p"
        for index in range(4):
            pixels = np.full((24, 32, 3), 60 * index, np.uint8)
            for packet in stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")):
                video.mux(packet)
        for packet in stream.encode():
            video.mux(packet)


def test_a_film(upscale: Callable[..., Seen], tmp_path: Path) -> None:
    make_film(tmp_path / "video.mkv")
    seen = upscale("video.mkv", "--tile", "96")
    assert seen.code == 0, seen.err
    with av.open(str(tmp_path / "video-x2.mkv")) as video:
        frames = list(video.decode(video=0))
        assert [(frame.width, frame.height) for frame in frames] == [(64, 48)] * 4
    # It declares no colour matrix, which is told as soon as it is known, and once.
    assert seen.err.count("declares no colour matrix") == 1 and "video.mkv: " in seen.err
    again = upscale("video.mkv", "--resume")
    assert again.code == 0 and again.out == "" and "1 already complete" in again.err
    other = upscale("video.mkv", "--resume", "--crf", "30")
    assert other.code == 0 and "video-x2.mkv" in other.out


def test_options_for_what_is_not_there_are_said(upscale: Callable[..., Seen], tmp_path: Path) -> None:
    make_film(tmp_path / "video.mkv")
    seen = upscale("video.mkv", "--tile", "96", "--wrap", "--quality", "50", "--strip", "--crf", "40")
    assert seen.code == 0 and seen.err.count("is for images, and there are only videos") == 2
    assert "--wrap has no effect" in seen.err and "--quality has no effect" in seen.err
    assert "--crf has no effect" not in seen.err
    with av.open(str(tmp_path / "video-x2.mkv")) as video:
        assert "title" not in video.metadata
    save(tmp_path / "photo.png")
    seen = upscale("photo.png", "--tile", "96", "--crf", "40", "--format", "jpg")
    assert seen.code == 0 and "--crf has no effect: it is for videos, and there are only images" in seen.err
    assert seen.err.count("is for") == 1 and size(tmp_path / "photo-x2.jpg") == (60, 40)


def test_results_are_printed_as_they_are_finished(
    upscale: Callable[..., Seen], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was done before Ctrl-C is known, and files are called what they are called."""
    for name in ("a :smile: [red].png", "b.png"):
        save(tmp_path / "in" / name)
    tell = Journal.record

    def interrupt(self: Journal, task: Task, *rest: Any) -> None:
        if task.source.name == "b.png":
            raise KeyboardInterrupt
        tell(self, task, *rest)

    monkeypatch.setattr(Journal, "record", interrupt)
    seen = upscale("in", "-o", "out", "--tile", "96")
    assert seen.code == 130 and seen.out.startswith("out/a :smile: [red].png  60 × 40  ")


@pytest.mark.usefixtures("folders_called_locked")
def test_a_folder_that_cannot_be_read_is_a_failure(upscale: Callable[..., Seen], tmp_path: Path) -> None:
    save(tmp_path / "in" / "a.png")
    (tmp_path / "in" / "locked").mkdir()
    seen = upscale("in", "-o", "out", "--tile", "96")
    assert seen.code == 1 and seen.out.startswith("out/a.png") and "1 upscaled, 1 failed" in seen.err
    assert "failed: cannot read the folder 'in/locked': Permission denied." in seen.err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--calibrate", "photos"], "--calibrate is for int8: add --int8, or leave it out."),
        (["--int8"], "give a folder with --calibrate"),
        (["-o", "network.bin"], "cannot write 'network.bin': the file name must end in .onnx"),
    ],
)
def test_exports_that_cannot_be_meant(
    arguments: list[str], sentence: str, command: Callable[..., Seen], tmp_path: Path, weights: Path
) -> None:
    seen = command("export", "drct", "-w", weights, *arguments)
    assert seen.code == 2 and sentence in seen.err and not list(tmp_path.iterdir())


@pytest.mark.parametrize("tile", [0, -16, 32, 64])
def test_no_network_is_exported_that_upscale_would_refuse(
    tile: int, command: Callable[..., Seen], tmp_path: Path, weights: Path
) -> None:
    seen = command("export", "drct", "-w", weights, "--tile", tile, "-o", "small.onnx")
    assert seen.code == 2 and f"tiles of {tile} are too small for `redline upscale`: use 80 or more." in seen.err
    assert not list(tmp_path.iterdir())

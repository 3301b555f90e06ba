"""Long commands print their progress every few seconds if stderr is not a terminal."""

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from redline.cli import live_line
from redline.cli.live_line import LiveLine
from redline.cli.upscale import _Watch
from redline.errors import ModelError
from redline.models.drct import Drct, DrctConfig, save_drct
from redline.quiet import quiet
from redline.upscale import export as exporting
from redline.upscale.journal import Journal
from redline.upscale.tasks import Outcome, Task
from redline.upscale.video.settings import VideoProgress
from synthetic_photos import save_synthetic_photos

from .conftest import Seen


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_line, "LINE_EVERY_S", 0.05)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    save_drct(Drct(DrctConfig.of(2, 1, width=12, growth=6, features=4, window=4)), tmp_path / "tiny.safetensors")
    return tmp_path / "tiny.safetensors"


def slowed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Long enough for several lines."""

    def call(*arguments: Any, **options: Any) -> Any:
        time.sleep(0.2)
        return function(*arguments, **options)

    return call


@pytest.mark.usefixtures("often")
def test_line_is_printed_during_a_long_step_while_a_library_is_silenced(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with LiveLine("reading …") as line, quiet():
        time.sleep(0.2)
        line.count("scoring", 0, 8, "image")
        time.sleep(0.2)
        line.count("scoring", 2, 8, "image", "a [b]: 30 dB")
        time.sleep(0.2)
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("reading … (") and said[0].endswith(" so far)")
    assert any(text.startswith("scoring: 0 of 8 images (0%) (") for text in said)
    assert "scoring: 2 of 8 images (25%), " in said[-1] and " images/s, " in said[-1]
    assert " left · a [b]: 30 dB (" in said[-1]


def test_quick_commands_print_no_progress(capsys: pytest.CaptureFixture[str]) -> None:
    with LiveLine("reading …") as line:
        line.count("scoring", 1, 2, "image")
    assert capsys.readouterr().err == ""


def test_the_time_left_follows_the_rate_and_runs_down() -> None:
    count = live_line._Count("scoring", "image", 10, first_done=2, first_s=0, done=4, at_s=20, detail="")
    assert count.text(20) == "scoring: 4 of 10 images (40%), 6 images/min, 60 s left"
    assert count.text(50).endswith("30 s left") and count.text(500).endswith(", 1 s left")
    assert live_line._Count("reading", "frame", None, 0, 0, 90, 45, "").text(45) == "reading: 90 frames, 2 frames/s"
    one = live_line._Count("upscaling", "file", 1, first_done=0, first_s=0, done=0.25, at_s=20, detail="a.png")
    assert one.text(20) == "upscaling: 25%, 60 s left · a.png"
    assert live_line._format_rate(0.001, "image") == "3.6 images/h"


@pytest.mark.usefixtures("often")
def test_eval_sr(weights: Path, tmp_path: Path, command: Callable[..., Seen], monkeypatch: pytest.MonkeyPatch) -> None:
    save_synthetic_photos(tmp_path / "set", 2, 41, 50, seed=3)
    model = Drct.forward
    monkeypatch.setattr(Drct, "forward", slowed(model))
    seen = command("eval", "sr", weights, "set", "--bicubic", "--device", "cpu")
    assert seen.code == 0 and "scoring: 0 of 2 images (0%)" in seen.err
    assert "scoring: 1 of 2 images (50%), " in seen.err and " left · 0: " in seen.err


@pytest.mark.usefixtures("often")
def test_upscale(weights: Path, tmp_path: Path, command: Callable[..., Seen], monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in").mkdir()
    for name in ("a", "b"):
        Image.new("RGB", (30, 20)).save(tmp_path / "in" / f"{name}.png")
    monkeypatch.setattr(Journal, "record", slowed(Journal.record))
    seen = command("upscale", "in", "-o", "out", "-w", weights, "--device", "cpu")
    assert seen.code == 0 and "upscaling: 0 of 2 files (" in seen.err
    assert "upscaling: 1 of 2 files (" in seen.err and " left" in seen.err


@pytest.mark.usefixtures("often")
def test_export(weights: Path, command: Callable[..., Seen], monkeypatch: pytest.MonkeyPatch) -> None:
    """The exporter is silenced meanwhile; what it makes is looked at elsewhere."""

    def export(*_: Any) -> None:
        with quiet():
            time.sleep(0.3)
        raise ModelError("that is enough.")

    monkeypatch.setattr(exporting, "_export", export)
    seen = command("export", "drct", "-w", weights, "--tile", 80, "-o", "a.onnx")
    assert seen.code == 2 and "exporting DRCT of 1 group ×2, width 12 as a graph … (" in seen.err


def test_files_that_take_no_time_do_not_shorten_the_time_left(
    weights: Path, tmp_path: Path, command: Callable[..., Seen], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in").mkdir()
    Image.new("RGB", (200, 20)).save(tmp_path / "in" / "a.png")
    (tmp_path / "in" / "b.png").write_text("no picture")
    counted: list[tuple[float, float | None]] = []
    count = LiveLine.count

    def note(line: LiveLine, what: str, done: float, total: float | None, *more: Any, **options: Any) -> None:
        counted.append((done, total))
        count(line, what, done, total, *more, **options)

    monkeypatch.setattr(LiveLine, "count", note)
    seen = command("upscale", "in", "-o", "out", "-w", weights, "--device", "cpu", "--tile", 80)
    assert seen.code == 1 and counted[0] == (0, 2) and counted[-1] == (1, 1)
    # Tile by tile: a row of them may take minutes.
    assert any(0 < done < 1 for done, _ in counted)


def test_what_an_earlier_run_did_does_not_shorten_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(monotonic=lambda: now_s)
    monkeypatch.setattr(live_line, "time", clock)
    now_s = 0.0
    line = LiveLine("reading …")
    watch = _Watch(line, as_json=True)
    image, first, second = (Task(Path(name), Path("out") / name) for name in ("a.png", "b.mkv", "c.mkv"))
    watch.begin([image, first, second])
    now_s = 60.0  # a minute to find that the image is complete
    watch._finished(Outcome(image, skipped=True))
    watch._video(first, VideoProgress(80, 100, 80, None, None, ()))
    assert line._text.startswith("upscaling: 0 of 2 files (40%) · b.mkv: frame 80 of 100")
    now_s = 70.0
    watch._video(first, VideoProgress(90, 100, 80, 1.0, 10.0, ()))
    assert line._text.startswith("upscaling: 0 of 2 files (45%), 36 files/h, 110 s left · ")
    now_s = 80.0
    watch._finished(Outcome(first, seconds=20.0))
    watch._video(second, VideoProgress(50, 100, 50, None, None, ()))
    assert line._text.startswith("upscaling: 1 of 2 files (75%), 36 files/h, 50 s left · ")
    # A video that fails is no work that is left.
    watch._finished(Outcome(second, error="cannot read 'c.mkv'"))
    assert line._text == "upscaling: 100%"


def test_the_rate_counts_from_the_first_update_of_this_run(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(live_line, "time", SimpleNamespace(monotonic=lambda: now_s))
    line = LiveLine("reading …")
    line.count("scoring", 10, 100, "file", before=8)
    now_s = 4.0
    line.count("scoring", 14, 100, "file", before=8)
    assert line._text == "scoring: 14 of 100 files (14%), 1 files/s, 86 s left"

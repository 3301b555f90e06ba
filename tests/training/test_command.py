"""`redline train drct` from a settings file to weights, through an interruption, with figures that can be read."""

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from redline.cli.train import train
from redline.errors import RedlineError
from redline.models.drct import load_drct
from redline.training.bundled import find_config
from redline.training.loop import Progress
from synthetic_photos import save_synthetic_photos

command = sys.modules["redline.cli.train"]
SETTINGS = """
[model]
scale = 2
groups = 1
width = 8
growth = 4
features = 6
window = 4
[data]
crop_px = 8
batch = 2
[training]
minutes = 600
precision = "fp32"
log_every = 1
validate_every = 3
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    save_synthetic_photos(tmp_path / "photos", 2, 48, 53, seed=1)
    save_synthetic_photos(tmp_path / "test", 1, 37, 42, seed=2)
    (tmp_path / "photos" / "broken.jpg").write_bytes(b"no picture")
    (tmp_path / "tiny.toml").write_text(SETTINGS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str) -> Result:
    usual = ("drct", "tiny.toml", "--photos", "photos", "--validation", "test", "--device", "cpu")
    return CliRunner().invoke(train, [*usual, *arguments])


def test_it_trains_and_prints_the_result(here: Path) -> None:
    seen = run("--steps", "4", "--json")
    assert seen.exit_code == 0, seen.output
    said = json.loads(seen.stdout)
    assert said["steps"] == 4 and said["scores"]["test"]["psnr_y_db"] > 0 and said["bicubic"]["test"]["ssim_y"] > 0
    assert "skipped:" in seen.stderr and "broken.jpg" in seen.stderr and "images/s" in seen.stderr
    assert re.search(r"2 photos, 0\.00\d+ megapixels", seen.stderr)
    folder = here / "redline-out" / "train" / "tiny"
    assert {file.name for file in folder.iterdir()} == {
        "checkpoints",
        "journal.jsonl",
        "model.safetensors",
        "model-card.md",
    }
    assert load_drct(folder / "model.safetensors").config.scale == 2


def test_ctrl_c_saves_and_resume_continues(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = command.TrainingLine

    class Interrupting(line):
        def __call__(self, seen: Progress) -> None:
            super().__call__(seen)
            if seen.step == 3:
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(command, "TrainingLine", Interrupting)
    stopped = run("--steps", "5", "--out", "x")
    assert stopped.exit_code == 130 and "stopped at step 3 and saved" in stopped.stderr
    again = "redline train drct tiny.toml --photos photos --validation test --steps 5 --device cpu --out x --resume"
    assert again in stopped.stderr
    assert not (here / "x" / "model.safetensors").exists()
    monkeypatch.setattr(command, "TrainingLine", line)
    finished = run("--steps", "5", "--out", "x", "--resume")
    assert finished.exit_code == 0, finished.output
    assert "PSNR-Y" in finished.stdout and "5 steps" in finished.stdout
    steps = [json.loads(row)["step"] for row in (here / "x" / "journal.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 3, 4, 5, 5], "it is judged at its end too"


def test_it_starts_from_weights_of_another_scale(here: Path) -> None:
    assert run("--steps", "2", "--out", "x2").exit_code == 0
    (here / "tiny.toml").write_text(SETTINGS.replace("scale = 2", "scale = 3"))
    seen = run("--steps", "2", "--out", "x3", "--start", "x2/model.safetensors")
    assert seen.exit_code == 0, seen.output
    assert "starting from all weights but those of the upsampling of `model.safetensors`" in seen.stderr
    (here / "tiny.toml").write_text(SETTINGS.replace("width = 8", "width = 12"))
    with pytest.raises(RedlineError, match="its width is 8, and the config says 12"):
        CliRunner().invoke(
            train,
            ["drct", "tiny.toml", "--photos", "photos", "--start", "x2/model.safetensors", "--device", "cpu"],
            catch_exceptions=False,
        )


def test_a_short_time_is_kept(here: Path) -> None:
    seen = run("--time", "500ms", "--json")
    assert seen.exit_code == 0, seen.output
    assert 0.5 <= json.loads(seen.stdout)["elapsed_s"] < 5


def test_settings_are_found_by_file_or_name(here: Path) -> None:
    assert find_config("tiny.toml") == (Path("tiny.toml"), "drct")
    assert find_config("drct-small-x4", "drct")[0].is_file()
    with pytest.raises(RedlineError, match="super-resolution model: .* one of drct-small-x2, drct-small-x4.$"):
        find_config("drct-tiny", "drct")
    for kind, name, said in (
        ("lsd", "drct-small-x4", "not of a live video model: train it with `redline train drct drct-small-x4`[.]$"),
        ("text", "lsd-tiny", "not of a language model: train it with `redline train lsd lsd-tiny`[.]$"),
        ("drct", "decoder-tiny", "not of a super-resolution model: train it with `redline train decoder-tiny`[.]$"),
    ):
        with pytest.raises(RedlineError, match=said):
            find_config(name, kind)


def test_settings_may_come_through_a_pipe(here: Path) -> None:
    os.mkfifo("pipe")
    assert find_config("pipe", "drct") == (Path("pipe"), "drct")


def test_a_folder_does_not_hide_settings_of_its_name(here: Path) -> None:
    Path("drct-small-x4").mkdir()
    assert find_config("drct-small-x4", "drct")[0].is_file()

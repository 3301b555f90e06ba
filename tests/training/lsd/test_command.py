"""`redline train lsd` from a settings file to weights, through an interruption, with figures that can be read."""

import json
import signal
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from redline.cli.train import train
from redline.errors import RedlineError
from redline.models.lsd import load_lsd
from redline.training.loop import Progress
from synthetic_photos import save_synthetic_photos

command = sys.modules["redline.cli.train"]
SETTINGS = """
[model]
patch = 2
width = 8
multipliers = [1, 2]
[data]
frame_px = 16
world_px = 32
batch = 2
[stages]
frames = 2
teacher_steps = 2
[training]
minutes = 600
precision = "fp32"
log_every = 1
validate_every = 3
validation_clips = 1
validation_frames = 4
final_frames = 6
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    save_synthetic_photos(tmp_path / "photos", 2, 48, 53, seed=1)
    save_synthetic_photos(tmp_path / "held-out", 1, 37, 42, seed=2)
    (tmp_path / "photos" / "broken.jpg").write_bytes(b"no picture")
    (tmp_path / "tiny.toml").write_text(SETTINGS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str) -> Result:
    usual = ("lsd", "tiny.toml", "--photos", "photos", "--validation", "held-out", "--device", "cpu")
    return CliRunner().invoke(train, [*usual, *arguments])


def test_it_trains_and_prints_the_result(here: Path) -> None:
    seen = run("--steps", "4", "--json")
    assert seen.exit_code == 0, seen.output
    said = json.loads(seen.stdout)
    assert said["steps"] == 4 and said["stage"] == "distillation" and said["scores"]["held-out"]["frames"] == 6
    assert "skipped:" in seen.stderr and "broken.jpg" in seen.stderr and "clips/s" in seen.stderr
    assert "held-out_gain_db" in seen.stderr
    folder = here / "redline-out" / "train" / "tiny"
    names = {"checkpoints", "journal.jsonl", "model.safetensors", "model-card.md"}
    assert {file.name for file in folder.iterdir()} == names
    assert load_lsd(folder / "model.safetensors").config.width == 8


def test_ctrl_c_saves_and_resume_continues(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = command.TrainingLine

    class Interrupting(line):
        def __call__(self, seen: Progress) -> None:
            super().__call__(seen)
            if seen.step == 2:
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(command, "TrainingLine", Interrupting)
    stopped = run("--steps", "3", "--out", "x")
    assert stopped.exit_code == 130 and "stopped at step 2 and saved" in stopped.stderr
    said = " ".join(stopped.stderr.split())
    again = "redline train lsd tiny.toml --photos photos --validation held-out --steps 3 --device cpu --out x --resume"
    assert again in said
    assert not (here / "x" / "model.safetensors").exists()
    monkeypatch.setattr(command, "TrainingLine", line)
    finished = run("--steps", "3", "--out", "x", "--resume")
    assert finished.exit_code == 0, finished.output
    assert "frame by frame" in finished.stdout and "3 steps" in finished.stdout and "up to rollouts" in finished.stdout


def test_a_bad_config_raises_one_error(here: Path) -> None:
    (here / "tiny.toml").write_text(SETTINGS.replace("[stages]", "[stages]\nframe = 3"))
    seen = run("--steps", "1")
    assert isinstance(seen.exception, RedlineError) and "did you mean frames?" in str(seen.exception)

"""`redline train drct` and `redline train lsd` train from a config, through an interruption."""

import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from redline.cli.train import train
from redline.errors import RedlineError
from redline.models.drct import load_drct
from redline.models.lsd import load_lsd
from redline.training.bundled import find_config
from redline.training.loop import Progress
from synthetic_photos import save_synthetic_photos

command = sys.modules["redline.cli.train"]
SETTINGS = {
    "drct": """
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
""",
    "lsd": """
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
""",
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    save_synthetic_photos(tmp_path / "photos", 2, 48, 53, seed=1)
    save_synthetic_photos(tmp_path / "held-out", 1, 37, 42, seed=2)
    (tmp_path / "photos" / "broken.jpg").write_bytes(b"no picture")
    for kind, settings in SETTINGS.items():
        (tmp_path / f"{kind}.toml").write_text(settings)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(kind: str, *arguments: str) -> Result:
    usual = (kind, f"{kind}.toml", "--photos", "photos", "--validation", "held-out", "--device", "cpu")
    return CliRunner().invoke(train, [*usual, *arguments])


def trained(here: Path, kind: str) -> tuple[dict[str, Any], str, Path]:
    """Trains a few steps; returns the JSON output, the messages and the weights."""
    seen = run(kind, "--steps", "4", "--json")
    assert seen.exit_code == 0, seen.output
    assert "skipped:" in seen.stderr and "broken.jpg" in seen.stderr
    folder = here / "redline-out" / "train" / kind
    names = {"checkpoints", "journal.jsonl", "model.safetensors", "model-card.md"}
    assert {file.name for file in folder.iterdir()} == names
    return json.loads(seen.stdout), seen.stderr, folder / "model.safetensors"


def test_drct_trains_and_prints_the_result(here: Path) -> None:
    said, messages, weights = trained(here, "drct")
    assert said["steps"] == 4 and said["scores"]["held-out"]["psnr_y_db"] > 0
    assert said["bicubic"]["held-out"]["ssim_y"] > 0 and "images/s" in messages
    assert re.search(r"2 photos, 0\.00\d+ megapixels", messages)
    assert load_drct(weights).config.scale == 2


def test_lsd_trains_and_prints_the_result(here: Path) -> None:
    said, messages, weights = trained(here, "lsd")
    assert said["steps"] == 4 and said["stage"] == "distillation" and said["scores"]["held-out"]["frames"] == 6
    assert "clips/s" in messages and "held-out_gain_db" in messages
    assert load_lsd(weights).config.width == 8


@pytest.mark.parametrize(("kind", "steps"), [("drct", 5), ("lsd", 3)])
def test_ctrl_c_saves_and_resume_continues(here: Path, monkeypatch: pytest.MonkeyPatch, kind: str, steps: int) -> None:
    words = {"drct": ("PSNR-Y",), "lsd": ("frame by frame", "up to rollouts")}[kind]
    line, last = command.TrainingLine, 3 if kind == "drct" else 2

    class Interrupting(line):
        def __call__(self, seen: Progress) -> None:
            super().__call__(seen)
            if seen.step == last:
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(command, "TrainingLine", Interrupting)
    stopped = run(kind, "--steps", str(steps), "--out", "x")
    assert stopped.exit_code == 130 and f"stopped at step {last} and saved" in stopped.stderr
    given = f"--photos photos --validation held-out --steps {steps} --device cpu --out x --resume"
    assert f"redline train {kind} {kind}.toml {given}" in stopped.stderr
    assert not (here / "x" / "model.safetensors").exists()
    monkeypatch.setattr(command, "TrainingLine", line)
    finished = run(kind, "--steps", str(steps), "--out", "x", "--resume")
    assert finished.exit_code == 0, finished.output
    assert all(word in finished.stdout for word in (*words, f"{steps} steps"))
    if kind == "drct":
        logged = [json.loads(row)["step"] for row in (here / "x" / "journal.jsonl").read_text().splitlines()]
        assert logged == [1, 2, 3, 3, 4, 5, 5], "it is judged at its end too"


def test_a_bad_config_raises_one_error(here: Path) -> None:
    (here / "lsd.toml").write_text(SETTINGS["lsd"].replace("[stages]", "[stages]\nframe = 3"))
    seen = run("lsd", "--steps", "1")
    assert isinstance(seen.exception, RedlineError) and "did you mean frames?" in str(seen.exception)


def test_it_starts_from_weights_of_another_scale(here: Path) -> None:
    assert run("drct", "--steps", "2", "--out", "x2").exit_code == 0
    (here / "drct.toml").write_text(SETTINGS["drct"].replace("scale = 2", "scale = 3"))
    seen = run("drct", "--steps", "2", "--out", "x3", "--start", "x2/model.safetensors")
    assert seen.exit_code == 0, seen.output
    assert "starting from all weights but those of the upsampling of `model.safetensors`" in seen.stderr
    (here / "drct.toml").write_text(SETTINGS["drct"].replace("width = 8", "width = 12"))
    with pytest.raises(RedlineError, match="its width is 8, and the config says 12"):
        CliRunner().invoke(
            train,
            ["drct", "drct.toml", "--photos", "photos", "--start", "x2/model.safetensors", "--device", "cpu"],
            catch_exceptions=False,
        )


def test_a_short_time_is_kept(here: Path) -> None:
    seen = run("drct", "--time", "500ms", "--json")
    assert seen.exit_code == 0, seen.output
    assert 0.5 <= json.loads(seen.stdout)["elapsed_s"] < 5


def test_settings_are_found_by_file_or_name(here: Path) -> None:
    assert find_config("drct.toml") == (Path("drct.toml"), "drct")
    assert find_config("drct-small-x4", "drct")[0].is_file()
    with pytest.raises(RedlineError, match="super-resolution model: .* one of drct-small-x2, drct-small-x4.$"):
        find_config("drct-tiny", "drct")
    for kind, name, said in (
        ("lsd", "drct-small-x4", "not for a live video model: train it with `redline train drct drct-small-x4`[.]$"),
        ("text", "lsd-tiny", "not for a language model: train it with `redline train lsd lsd-tiny`[.]$"),
        ("drct", "decoder-tiny", "not for a super-resolution model: train it with `redline train decoder-tiny`[.]$"),
    ):
        with pytest.raises(RedlineError, match=said):
            find_config(name, kind)


def test_settings_may_come_through_a_pipe(here: Path) -> None:
    os.mkfifo("pipe")
    assert find_config("pipe", "drct") == (Path("pipe"), "drct")

"""A long training in pieces: a piece continues the one before it, ends in time, and stops when it is told to."""

import json
import signal
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from benchmark_scripts import load_script
from redline.models.drct import load_drct
from redline.training.checkpoints import read_checkpoint
from synthetic_photos import save_synthetic_photos

SETTINGS = """
[model]
scale = 2
groups = 1
width = 8
growth = 4
features = 6
window = 4
weights = "fp32"

[data]
shrink = [1, 1.2]
vary = 0.2
renew_steps = 3
crop_px = 8
batch = 2
drawn = 0.25

[training]
steps = {steps}
precision = "fp32"
warmup_steps = 2
log_every = 1
frequency_weight = 1.0
frequency_from = 0.5
"""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("long_training")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    save_synthetic_photos(tmp_path / "data/train/photos", 2, 60, 50)
    save_synthetic_photos(tmp_path / "data/train/drawn", 1, 40, 40, seed=1)
    save_synthetic_photos(tmp_path / "data/Set1", 1, 24, 24, seed=2)
    return tmp_path / "data"


def piece(script: ModuleType, data: Path, out: Path, steps: int, *arguments: str) -> dict[str, Any]:
    """Runs one piece and returns its result."""
    config = out.with_suffix(".toml")
    config.write_text(SETTINGS.format(steps=steps))
    usual = [str(config), "--data", str(data), "--out", str(out), "--device", "cpu", *arguments]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "argv", ["long_training.py", *usual])
        assert script.main() == 0
    return json.loads((out / "result.json").read_text())


def stopped_after(script: ModuleType, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Makes the piece receive SIGTERM as soon as that step is logged."""

    class Stopping:
        def __call__(self, seen: Any) -> None:
            if seen.step == step:
                signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(script, "Lines", Stopping)


def test_two_pieces_are_one_training(
    script: ModuleType, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = piece(script, data, tmp_path / "whole", 8)
    assert whole["finished"] and whole["step"] == whole["steps_in_piece"] == 8
    assert json.loads(capsys.readouterr().out) == whole and whole["Set1_psnr_y_db"] > 10

    with monkeypatch.context() as patched:
        stopped_after(script, patched, 5)
        first = piece(script, data, tmp_path / "first", 8)
    assert not first["finished"] and first["step"] == 5
    second = piece(script, data, tmp_path / "second", 8, "--state", str(tmp_path / "first"))
    assert second["finished"] and second["step"] == 8 and second["steps_in_piece"] == 3

    entries = [json.loads(line) for line in (tmp_path / "second/journal.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in entries if "loss" in entry] == list(range(1, 9))
    with_frequencies = [entry["step"] for entry in entries if entry.get("penalties") == ["frequencies"]]
    assert with_frequencies == [5, 6, 7, 8]
    # The moments were rounded to bf16 once, and the weights not at all.
    ours, theirs = (load_drct(tmp_path / name / "model.safetensors").state_dict() for name in ("second", "whole"))
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, rtol=0, atol=2e-5)
    losses = [
        [json.loads(line).get("loss") for line in (tmp_path / name / "journal.jsonl").read_text().splitlines()]
        for name in ("second", "whole")
    ]
    assert losses[0][:5] == losses[1][:5]


def test_the_state_is_compact(script: ModuleType, data: Path, tmp_path: Path) -> None:
    result = piece(script, data, tmp_path / "out", 2)
    parameters = result["parameters"]
    content = read_checkpoint(tmp_path / "out/state.pt")
    moments = content["optimizer"]["state"][0]
    assert moments["exp_avg"].dtype == moments["exp_avg_sq"].dtype == torch.bfloat16
    assert all(tensor.dtype == torch.float32 for tensor in content["model"].values())
    tensors = [*content["model"].values(), *content["ema"].values()]
    tensors += [value for state in content["optimizer"]["state"].values() for value in state.values() if value.ndim]
    assert sum(tensor.nbytes for tensor in tensors) == 10 * parameters


def test_a_piece_ends_in_time(script: ModuleType, data: Path, tmp_path: Path) -> None:
    result = piece(script, data, tmp_path / "out", 10**6, "--minutes", "0.05", "--reserve", "1")
    assert not result["finished"] and 0 < result["step"] < 10**6
    assert not [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
    assert (tmp_path / "out/state.pt").exists() and (tmp_path / "out/model.safetensors").exists()


def test_what_cannot_be_continued_is_refused(
    script: ModuleType, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "x.toml"
    config.write_text(SETTINGS.format(steps=2))
    (tmp_path / "state").mkdir()
    (tmp_path / "state/state.pt").write_bytes(b"damaged")
    arguments = [str(config), "--data", str(data), "--out", str(tmp_path / "out"), "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["long_training.py", *arguments, "--state", str(tmp_path / "state")])
    assert script.main() == 2
    assert "damaged" in capsys.readouterr().err

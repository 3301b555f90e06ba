"""`redline eval sr` prints the papers' figures, for weights and for bicubic, as a table and as JSON."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from redline.cli.eval import eval as command
from redline.errors import RedlineError
from redline.evaluation.super_resolution import bicubic_model, evaluate, find_pairs
from redline.models.drct import Drct, DrctConfig, save_drct
from synthetic_photos import save_photo, save_synthetic_photos


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    save_synthetic_photos(tmp_path / "set", 2, 41, 50, seed=3)
    save_drct(Drct(DrctConfig.of(2, 1, 8, 4, features=4, window=4)), tmp_path / "model.safetensors")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(command, ["sr", *arguments, "--device", "cpu"])


def test_weights_beside_bicubic(here: Path) -> None:
    seen = run("model.safetensors", "set", "--bicubic", "--json")
    assert seen.exit_code == 0, seen.output
    said = json.loads(seen.stdout)
    expected = evaluate(bicubic_model(2), find_pairs(here / "set"), 2)
    assert said["scale"] == 2 and said["bicubic"]["mean"]["psnr_y_db"] == pytest.approx(expected.mean.psnr_y_db)
    assert [picture["name"] for picture in said["images"]] == ["0", "1"]
    assert said["mean"]["psnr_y_db"] < said["bicubic"]["mean"]["psnr_y_db"]
    assert "all made from the high-resolution ones" in seen.stderr
    table = run("model.safetensors", "set", "--bicubic").stdout
    assert f"{expected.mean.psnr_y_db:.2f}" in table and "mean of 2" in table and "50 × 40" in table


def test_bicubic_alone_needs_its_factor(here: Path) -> None:
    seen = run("bicubic", "set", "--scale", "4")
    mean = evaluate(bicubic_model(4), find_pairs(here / "set"), 4).mean
    assert seen.exit_code == 0 and f"{mean.psnr_y_db:.2f}" in seen.stdout and f"{mean.ssim_y:.4f}" in seen.stdout
    with pytest.raises(RedlineError, match="--scale 4"):
        raise_of(run("bicubic", "set"))


def test_stored_small_pictures_are_used(here: Path) -> None:
    save_synthetic_photos(here / "pairs" / "HR", 1, 40, 48, seed=4)
    save_photo(here / "pairs" / "LR" / "0.png", torch.zeros(3, 20, 24, dtype=torch.uint8))
    seen = run("bicubic", "pairs", "--scale", "2", "--json")
    (picture,) = json.loads(seen.stdout)["images"]
    assert not picture["made"] and picture["psnr_y_db"] < 15 and "made from" not in seen.stderr


def test_impossible_requests_are_sentences(here: Path) -> None:
    (here / "exported.onnx").write_bytes(b"whatever")
    for arguments, said in (
        (("model.safetensors", "set", "--scale", "4"), "is for ×2, not ×4"),
        (("none.safetensors", "set"), "cannot read the weights"),
        (
            ("exported.onnx", "set"),
            "'exported.onnx' is an exported ONNX model: use the weights that it was exported from",
        ),
        (("model.safetensors", "nowhere"), "no folder"),
        (("model.safetensors", "set", "--precision", "int8"), "unknown precision"),
    ):
        with pytest.raises(RedlineError, match=said):
            raise_of(run(*arguments))


def test_names_are_printed_as_they_are(here: Path) -> None:
    save_synthetic_photos(here / "odd", 1, 24, 24, seed=5)
    (here / "odd" / "0.png").rename(here / "odd" / "a [bold] :smile:.png")
    assert "a [bold] :smile:" in run("bicubic", "odd", "--scale", "2").stdout


def raise_of(seen: Result) -> None:
    assert seen.exception is not None
    raise seen.exception

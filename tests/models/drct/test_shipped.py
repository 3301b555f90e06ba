"""The models in the package: small, described, and better than interpolation on pictures made here."""

from importlib import resources
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from redline.evaluation.super_resolution import bicubic_model, evaluate, find_pairs
from redline.ladder.plan import Plan
from redline.machine.machine import Machine
from redline.models.drct import load_drct
from redline.upscale.network import shipped_weights
from synthetic_photos import save_synthetic_photos


@pytest.mark.parametrize("scale", [2, 4])
def test_a_shipped_model_beats_interpolation(scale: int, tmp_path: Path) -> None:
    path = shipped_weights(scale)
    assert path.stat().st_size <= 8_000_000
    model = load_drct(path)
    assert model.config.scale == scale
    save_synthetic_photos(tmp_path / "smooth", 1, 64, 80, seed=5)
    # Letters and lines: what interpolation blurs.
    lines = np.full((64, 80, 3), 230, np.uint8)
    lines[8:56:8], lines[:, 5:75:10], lines[20:40, 30:50] = 20, 60, (200, 40, 40)
    Image.fromarray(lines).save(tmp_path / "smooth" / "lines.png")
    pairs = find_pairs(tmp_path / "smooth")
    ours = evaluate(model, pairs, scale, model.config.window, torch.device("cpu"))
    plain = evaluate(bicubic_model(scale), pairs, scale)
    assert ours.mean.psnr_y_db > plain.mean.psnr_y_db + 0.5


@pytest.mark.parametrize("scale", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_bf16_is_near_fp32(scale: int, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """What speed may cost on photos: no more than to 45 dB."""
    # One window is enough where bf16 is emulated.
    sides = (64, 80) if "bf16" in Machine.detect("cpu").hardware_dtypes else (16, 16)
    (path,) = save_synthetic_photos(tmp_path, 1, *sides, seed=6).iterdir()
    picture = torch.from_numpy(np.array(Image.open(path))).permute(2, 0, 1)[None] / 255
    model = load_drct(shipped_weights(scale))
    request.getfixturevalue("any_precision")
    fast = Plan.parse("fused_ops + bf16").apply(model, samples=picture)
    with torch.no_grad():
        off = fast(picture).double() - model(picture).double()
    assert -10 * off.square().mean().log10() >= 45


LICENCES = ("The weights are under the Apache License 2.0", "CC0 1.0", "CC BY-SA 4.0")


@pytest.mark.parametrize("scale", [2, 4])
def test_a_card_says_how_it_was_made(scale: int) -> None:
    card = (resources.files("redline.models.drct") / "weights" / f"drct-small-x{scale}.md").read_text("utf-8")
    for words in ("## Data", "## Training", "## Scores", "## Limits", "Set5", "Set14", *LICENCES):
        assert words in card

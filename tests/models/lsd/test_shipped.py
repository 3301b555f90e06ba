"""The live model in the package: small, described, and better than its input on clips made here."""

from dataclasses import replace
from importlib import resources
from pathlib import Path

import torch

from redline.datasets.clips import Clips
from redline.models.lsd import load_lsd
from redline.stream.loading import SHIPPED
from redline.training.bundled import CONFIGS
from redline.training.lsd.settings import LsdTraining
from redline.training.lsd.validation import judge, restorer
from synthetic_photos import save_synthetic_photos


def test_the_shipped_model_restores_and_is_steadier_than_frame_by_frame(tmp_path: Path) -> None:
    assert SHIPPED.stat().st_size <= 8_000_000
    save_synthetic_photos(tmp_path / "photos", 4, 192, 224, seed=7)
    settings = LsdTraining.read(CONFIGS / "lsd-tiny.toml", photos=str(tmp_path / "photos"))
    data = replace(settings.data, batch=2, frame_px=96, world_px=160, shrink=(1,), cuts=0.0)
    clip = Clips(data, torch.device("cpu"), 3).clip(0, 10)
    model, steps = load_lsd(SHIPPED), settings.stages.sample_steps
    seen = judge(restorer(model, steps, 2, 96, torch.device("cpu")), clip, steps)
    # The 2 dB and more of its card are of photos; these are stripes and blots.
    assert seen.gain_db > 0.5 and seen.warp_error < seen.alone_warp_error


def test_a_card_says_how_it_was_made() -> None:
    card = (resources.files("redline.models.lsd") / "weights" / "lsd-tiny.md").read_text("utf-8")
    licences = ("The weights are under the Apache License 2.0", "CC0 1.0", "CC BY-SA 4.0")
    for words in ("## Data", "## Training", "## Scores", "## Limits", "1000", *licences):
        assert words in card

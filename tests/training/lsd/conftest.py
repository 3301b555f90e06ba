"""The config of a tiny LSD training run, with photos to train and validate on."""

from pathlib import Path

import pytest

from redline.training.lsd.settings import LsdTraining
from synthetic_photos import save_synthetic_photos

SETTINGS = """
[model]
size = "tiny"
patch = 2
width = 8
multipliers = [1, 2]
weights = "fp32"

[data]
photos = "{folder}/photos"
validation = ["{folder}/test"]
frame_px = 16
world_px = 32
batch = 2

[stages]
rollouts_from = 0.34
distillation_from = 0.66
frames = 2
teacher_steps = 2

[training]
steps = 6
precision = "fp32"
learning_rate = 2e-3
warmup_steps = 2
log_every = 1
validation_clips = 2
validation_frames = 4
final_frames = 8
"""


@pytest.fixture
def settings(tmp_path: Path) -> LsdTraining:
    save_synthetic_photos(tmp_path / "photos", 2, 48, 53, seed=1)
    save_synthetic_photos(tmp_path / "test", 2, 37, 42, seed=2)
    (tmp_path / "lsd.toml").write_text(SETTINGS.format(folder=tmp_path))
    return LsdTraining.read(tmp_path / "lsd.toml")

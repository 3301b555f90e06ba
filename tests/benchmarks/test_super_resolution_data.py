"""Packed training data: the most detailed part of each photo, drawn images that a seed decides, lossless test sets."""

import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from PIL import Image

from benchmark_scripts import load_script
from synthetic_photos import save_photo, save_synthetic_photos, synthetic_photo


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("super_resolution_data")


def test_the_window_is_where_the_detail_is(script: ModuleType) -> None:
    image = np.full((160, 160, 3), 128, np.uint8)
    image[80:, 80:] = np.random.default_rng(0).integers(0, 256, (80, 80, 1))
    detail = script.detail_of(Image.fromarray(image))
    assert detail.shape == (10, 10) and detail[:4, :4].max() < 1 < detail[6:, 6:].min()
    assert script.best_window(detail, 0.5) == (5, 5, (5, 5))
    assert script.best_window(detail, 1.0) == (0, 0, (10, 10))


def test_a_folder_is_packed(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    photos = save_synthetic_photos(tmp_path / "photos", 1, 96, 128)
    save_photo(photos / "bysa-x.png", synthetic_photo(96, 128, 3))
    Image.new("RGB", (128, 96), "navy").save(photos / "flat.png")
    tests = save_synthetic_photos(tmp_path / "Set1", 1, 24, 24, seed=1)
    out = tmp_path / "out"
    usual = ["--photos", str(photos), "--exclude", "bysa-*", "--test-set", str(tests), "--format", "jpeg"]
    arguments = [*usual, "--drawn", "0", "--share", "0.64", "--jobs", "1", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["super_resolution_data.py", *arguments])
    assert script.main() == 0
    assert [path.name for path in (out / "train/photos").iterdir()] == ["0.jpg"]
    with Image.open(out / "train/photos/0.jpg") as packed:
        assert packed.size == (96, 80)
    assert json.loads((out / "sources.json").read_text())["photos"] == ["photos/0.png"]
    stored, original = (np.asarray(Image.open(path)) for path in (out / "Set1/0.webp", tests / "0.png"))
    assert np.array_equal(stored, original)


def test_drawn_images_are_decided_by_the_seed(script: ModuleType) -> None:
    drawn = sys.modules["drawn_images"]
    for index in range(len(drawn.SCENES)):
        name, image = drawn.draw_image(index, 64, [], seed=1)
        assert image.size == (64, 64) and np.asarray(image).std() > 2, name
    first, again, other = (np.asarray(drawn.draw_image(2, 64, [], seed)[1]) for seed in (1, 1, 2))
    assert np.array_equal(first, again) and not np.array_equal(first, other)

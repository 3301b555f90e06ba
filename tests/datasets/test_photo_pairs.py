"""Photos to train on: the limits of the settings, and which photos are large enough."""

from pathlib import Path
from typing import Any

import pytest
import torch

from redline.datasets.photo_pairs import PhotoPairs, PhotoSettings
from redline.errors import RedlineError
from redline.files.config_fields import decode
from synthetic_photos import save_synthetic_photos


@pytest.mark.parametrize(
    "values",
    [{"batch": 1, "crop_px": 1, "focus": 0.0, "flat": 0.0}, {"flat": 0.99, "recolour": 1.0}, {"shrink": (1, 2)}],
)
def test_settings_at_their_limits_are_taken(values: dict[str, Any]) -> None:
    assert decode(PhotoSettings, {"photos": "photos", **values}, "under [data]")


@pytest.mark.parametrize(
    "values",
    [
        {"photos": ""},
        {"shrink": ()},
        {"shrink": (0.9,)},
        {"shrink": (2, 2)},
        {"batch": 0},
        {"crop_px": 0},
        {"focus": -0.1},
        {"flat": 1.0},
        {"flat": -0.1},
        {"recolour": 1.1},
        {"recolour": -0.1},
    ],
    ids=str,
)
def test_settings_beyond_their_limits_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(RedlineError):
        decode(PhotoSettings, {"photos": "photos", **values}, "under [data]")


def test_a_photo_is_cut_to_whole_pixels_of_its_small_picture(tmp_path: Path) -> None:
    save_synthetic_photos(tmp_path, 1, 21, 30)
    settings = PhotoSettings(str(tmp_path), crop_px=5, shrink=(1, 1.5, 3))
    pairs = PhotoPairs(settings, 2, torch.device("cpu"))
    sizes = [(shrink, tuple(high.shape), tuple(low.shape)) for shrink, high, low, _ in pairs]
    assert sizes == [(1, (3, 20, 30), (3, 10, 15)), (1.5, (3, 14, 20), (3, 7, 10))]
    assert pairs.photos == 1 and pairs.pixels == 20 * 30 + 14 * 20 and len(pairs.hashes) == 1
    assert len(pairs.skipped) == 1 and "is 30 × 21, but shrink 3 needs 30 pixels per side" in pairs.skipped[0]


def test_a_photo_of_just_the_size_of_a_crop_is_used(tmp_path: Path) -> None:
    save_synthetic_photos(tmp_path, 1, 20, 20)
    assert len(list(PhotoPairs(PhotoSettings(str(tmp_path), crop_px=10), 2, torch.device("cpu")))) == 1
    with pytest.raises(RedlineError, match="no photo of .* needs 22 pixels per side"):
        list(PhotoPairs(PhotoSettings(str(tmp_path), crop_px=11), 2, torch.device("cpu")))

"""Test sets in their three layouts."""

from pathlib import Path

import pytest
import torch
from PIL import Image

from redline.datasets.bicubic import resize
from redline.datasets.photos import find_photos, read_photo
from redline.errors import RedlineError
from redline.evaluation.super_resolution.pairs import find_pairs
from synthetic_photos import synthetic_photo


def save(path: Path, height: int, width: int, seed: int = 0) -> torch.Tensor:
    pixels = synthetic_photo(height, width, seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(path)
    return pixels


def test_the_three_layouts(tmp_path: Path) -> None:
    save(tmp_path / "beside/a_HR.png", 8, 8)
    save(tmp_path / "beside/a_LR.png", 4, 4)
    save(tmp_path / "beside/b.png", 8, 8)
    save(tmp_path / "folders/HR/deep/a.png", 8, 8)
    save(tmp_path / "folders/LR/deep/a.png", 4, 4)
    save(tmp_path / "alone/a.png", 8, 8)
    save(tmp_path / "half/HR/a.png", 8, 8)
    found = {name: find_pairs(tmp_path / name) for name in ("beside", "folders", "alone", "half")}
    assert [(pair.name, pair.low is not None) for pair in found["beside"]] == [("a", True)]
    assert [(pair.name, pair.low is not None) for pair in found["folders"]] == [("deep/a", True)]
    assert [(pair.name, pair.low) for pair in found["alone"]] == [("a", None)]
    assert [(pair.name, pair.low) for pair in found["half"]] == [("a", None)]


def test_a_small_picture_of_another_scale_is_made_anew(tmp_path: Path) -> None:
    high = save(tmp_path / "a_HR.png", 9, 14)
    low = save(tmp_path / "a_LR.png", 4, 7, seed=1)
    (files,) = find_pairs(tmp_path)
    pair = files.read(2)
    assert torch.equal(pair.high, high[:, :8]) and torch.equal(pair.low, low) and not pair.made
    other = files.read(4)
    assert other.made and torch.equal(other.low, resize(high[:, :8, :12], 1 / 4)) and other.high.shape == (3, 8, 12)
    assert files.read(9).low.shape == (3, 1, 1)
    with pytest.raises(RedlineError, match="is too small for ×10: use at least 10 pixels"):
        files.read(10)


def test_pictures_are_found_by_their_suffix_in_a_fixed_order(tmp_path: Path) -> None:
    for name in ("b.PNG", "a/c.jpg", ".hidden/d.png", "a/.e.png"):
        save(tmp_path / name, 4, 4)
    (tmp_path / "text.txt").touch()
    assert [path.relative_to(tmp_path).as_posix() for path in find_photos(tmp_path)] == ["a/c.jpg", "b.PNG"]
    with pytest.raises(RedlineError, match="no folder"):
        find_photos(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(RedlineError, match="contains no images"):
        find_photos(tmp_path / "empty")


def test_a_picture_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    (tmp_path / "empty.png").touch()
    (tmp_path / "text.png").write_text("no picture")
    Image.new("I;16", (4, 4)).save(tmp_path / "deep.png")
    for name, sentence in (
        ("empty.png", "it is empty"),
        ("text.png", "Pillow does not support"),
        ("deep.png", "not an 8-bit image"),
        ("none.png", "No such file"),
    ):
        with pytest.raises(RedlineError, match=sentence):
            read_photo(tmp_path / name)

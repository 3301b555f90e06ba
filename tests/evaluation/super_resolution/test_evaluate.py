"""Test sets are found in every layout, pictures are padded and cropped, and a better model scores better."""

import doctest
from importlib import import_module
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor

from redline.datasets.bicubic import resize, to_8_bits
from redline.errors import RedlineError
from redline.evaluation.super_resolution import bicubic_model, enlarge, evaluate, find_pairs, score
from synthetic_photos import save_synthetic_photos


def save(path: Path, picture: Tensor) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.frombytes(
        "RGB", (picture.shape[2], picture.shape[1]), picture.permute(1, 2, 0).contiguous().numpy().tobytes()
    ).save(path)


def photo(height: int, width: int) -> Tensor:
    """Soft shapes: something that enlarging can get right."""
    return to_8_bits(resize(torch.rand(3, height // 5 + 1, width // 5 + 1), 5.0)[:, :height, :width] * 255)


def test_docstring_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_synthetic_photos(tmp_path / "photos", 2, 41, 50, seed=3)
    results = doctest.testmod(import_module("redline.evaluation.super_resolution.evaluate"))
    assert results.attempted and not results.failed


def test_marked_names_are_paired(tmp_path: Path) -> None:
    high = photo(48, 60)
    save(tmp_path / "a_HR.png", high)
    save(tmp_path / "a_LR.png", torch.zeros(3, 12, 15, dtype=torch.uint8))
    save(tmp_path / "b_HR.png", high)
    pairs = find_pairs(tmp_path)
    assert [(pair.name, pair.low is None) for pair in pairs] == [("a", False), ("b", True)]
    stored, made = (pair.read(4) for pair in pairs)
    assert not stored.made and int(stored.low.max()) == 0
    assert made.made and torch.equal(made.low, resize(high, 0.25)) and torch.equal(made.high, high)


def test_folders_of_large_and_small_are_paired(tmp_path: Path) -> None:
    save(tmp_path / "HR" / "x.png", photo(40, 44))
    save(tmp_path / "LR" / "x.bmp", photo(20, 22))
    (pair,) = find_pairs(tmp_path)
    assert not pair.read(2).made
    # Stored for ×2, asked for ×4.
    assert pair.read(4).made and pair.read(4).low.shape == (3, 10, 11)


def test_large_pictures_alone_are_cut_to_the_scale(tmp_path: Path) -> None:
    save(tmp_path / "deep" / "odd.png", photo(43, 61))
    (pair,) = find_pairs(tmp_path)
    read = pair.read(4)
    assert pair.name == "deep/odd" and read.high.shape == (3, 40, 60) and read.low.shape == (3, 10, 15) and read.made


def test_no_folder_and_no_pictures_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RedlineError, match="no folder"):
        find_pairs(tmp_path / "nowhere")
    (tmp_path / "notes.txt").write_text("no picture")
    with pytest.raises(RedlineError, match="no (pictures|images)"):
        find_pairs(tmp_path)
    with pytest.raises(RedlineError, match="no image"):
        evaluate(bicubic_model(4), [], 4)


def test_an_unreadable_picture_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n and then nothing")
    with pytest.raises(RedlineError, match="broken.png"):
        find_pairs(tmp_path)[0].read(4)


def test_bicubic_is_scored_as_computed_by_hand(tmp_path: Path) -> None:
    for name in ("one", "two"):
        save(tmp_path / f"{name}.png", photo(45, 52))
    pairs = find_pairs(tmp_path)
    told: list[str] = []
    seen = evaluate(bicubic_model(2), pairs, 2, tell=lambda picture: told.append(picture.name))
    by_hand = []
    for files in pairs:
        pair = files.read(2)
        by_hand.append(score(to_8_bits(resize(pair.low.float(), 2)), pair.high, 2))
    assert told == ["one", "two"]
    assert [p.psnr_y_db for p in seen.images] == pytest.approx([s.psnr_y_db for s in by_hand], abs=0.01)
    assert seen.mean.psnr_y_db == pytest.approx(sum(p.psnr_y_db for p in seen.images) / 2)
    assert seen.mean.ssim_y == pytest.approx(sum(s.ssim_y for s in by_hand) / 2, abs=1e-3)
    assert (seen.images[0].width_px, seen.images[0].height_px) == (52, 44)

    nearest = evaluate(lambda low: low.repeat_interleave(2, 2).repeat_interleave(2, 3), pairs, 2)
    assert nearest.mean.psnr_y_db < seen.mean.psnr_y_db and nearest.mean.ssim_y < seen.mean.ssim_y


@pytest.mark.parametrize("size", [(1, 5), (16, 16), (7, 31)])
def test_the_model_sees_whole_windows_and_its_own_picture_comes_back(size: tuple[int, int]) -> None:
    low = torch.randint(0, 256, (3, *size), dtype=torch.uint8)
    shapes: list[tuple[int, ...]] = []

    def model(picture: Tensor) -> Tensor:
        shapes.append(tuple(picture.shape))
        return picture.repeat_interleave(3, 2).repeat_interleave(3, 3)

    output = enlarge(model, low, 3, window=16)
    assert shapes == [(1, 3, -(-size[0] // 16) * 16, -(-size[1] // 16) * 16)]
    assert torch.equal(output, low.repeat_interleave(3, 1).repeat_interleave(3, 2))


def test_a_model_of_another_scale_and_one_that_overflows_are_refused() -> None:
    low = torch.zeros(3, 8, 8, dtype=torch.uint8)
    with pytest.raises(RedlineError, match="×4"):
        enlarge(bicubic_model(2), low, 4)
    with pytest.raises(RedlineError, match="finite"):
        enlarge(lambda picture: picture / 0, low, 1)

"""Crops lie where they say, in all eight turns; detail is preferred; bad photos are said and skipped."""

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from redline.datasets.bicubic import resize
from redline.datasets.photo_crops import PhotoCrops
from redline.datasets.photo_pairs import PhotoPairs, PhotoSettings
from redline.datasets.photos import read_photo
from redline.errors import RedlineError
from redline.files.config_fields import decode
from synthetic_photos import save_photo, save_synthetic_photos, synthetic_photo

CPU = torch.device("cpu")


def turned(crop: torch.Tensor, turn: int) -> torch.Tensor:
    """What a turn does, in torch's own words."""
    crop = crop.transpose(-1, -2) if turn & 4 else crop
    crop = crop.flip(-2) if turn & 1 else crop
    return crop.flip(-1) if turn & 2 else crop


@pytest.mark.parametrize("scale", [2, 3, 4])
def test_crops_are_the_photos_own_pixels_in_every_turn(tmp_path: Path, scale: int) -> None:
    save_synthetic_photos(tmp_path, 3, 101, 87)
    crops = PhotoCrops(PhotoSettings(str(tmp_path), crop_px=9, batch=64), scale, CPU, seed=5)
    pictures = [read_photo(tmp_path / f"{index}.png") for index in range(3)]
    pictures = [p[:, : 101 // scale * scale, : 87 // scale * scale] for p in pictures]
    draw = crops.draw(7)
    small, large = crops.batch(7)
    assert small.shape == (64, 3, 9, 9) and large.shape == (64, 3, 9 * scale, 9 * scale)
    assert large.is_contiguous(memory_format=torch.channels_last) and large.dtype == torch.float32
    rows = zip(draw.image.tolist(), draw.top.tolist(), draw.left.tolist(), draw.orientation.tolist(), strict=True)
    for index, (picture, top, left, turn) in enumerate(rows):
        high, low = pictures[picture], resize(pictures[picture], 1 / scale)
        inside = high[:, top * scale : (top + 9) * scale, left * scale : (left + 9) * scale]
        assert torch.equal((large[index] * 255).round().byte(), turned(inside, turn))
        assert torch.equal((small[index] * 255).round().byte(), turned(low[:, top : top + 9, left : left + 9], turn))
    assert set(draw.orientation.tolist()) == set(range(8)) and set(draw.image.tolist()) == {0, 1, 2}


def test_the_eight_turns_are_all_different() -> None:
    crop = torch.arange(9).view(1, 3, 3)
    assert len({tuple(turned(crop, turn).flatten().tolist()) for turn in range(8)}) == 8


def test_a_step_is_always_the_same_and_others_are_not(tmp_path: Path) -> None:
    save_synthetic_photos(tmp_path, 2)
    settings = PhotoSettings(str(tmp_path), crop_px=8, batch=4)
    one, two = PhotoCrops(settings, 4, CPU, seed=1), PhotoCrops(settings, 4, CPU, seed=1)
    assert torch.equal(one.batch(30)[1], two.batch(30)[1])
    assert not torch.equal(one.batch(30)[1], one.batch(31)[1])
    assert not torch.equal(one.batch(30)[1], PhotoCrops(settings, 4, CPU, seed=2).batch(30)[1])


def test_crops_reach_every_edge_and_never_beyond(tmp_path: Path) -> None:
    save_synthetic_photos(tmp_path, 1, 77, 94)
    crops = PhotoCrops(PhotoSettings(str(tmp_path), crop_px=7, batch=512, focus=0.0), 2, CPU)
    draws = [crops.draw(step) for step in range(8)]
    for starts, most in (("top", 38 - 7), ("left", 47 - 7)):
        seen = torch.cat([getattr(draw, starts) for draw in draws])
        assert seen.min() == 0 and seen.max() == most
    exactly = PhotoCrops(PhotoSettings(str(tmp_path), crop_px=38, batch=4), 2, CPU)
    assert exactly.draw(0).top.max() == 0 and exactly.batch(0)[0].shape == (4, 3, 38, 38)


@pytest.mark.parametrize(("focus", "least", "most"), [(0.0, 0.35, 0.65), (1.0, 0.8, 1.0)])
def test_detail_is_preferred_as_asked(tmp_path: Path, focus: float, least: float, most: float) -> None:
    half_flat = synthetic_photo(96, 192, 3)
    half_flat[:, :, :96] = 120
    save_photo(tmp_path / "a.png", half_flat)
    crops = PhotoCrops(PhotoSettings(str(tmp_path), crop_px=8, batch=500, focus=focus), 4, CPU)
    on_detail = (crops.draw(0).left + 4 >= 24).double().mean()
    assert least <= float(on_detail) <= most


def test_several_shrinks_are_all_trained_on(tmp_path: Path) -> None:
    save_synthetic_photos(tmp_path, 2, 96, 120)
    crops = PhotoCrops(PhotoSettings(str(tmp_path), crop_px=8, batch=600, shrink=(1, 2)), 4, CPU)
    assert crops.pairs.photos == 2 and crops.pairs.pixels == 2 * (96 * 120 + 48 * 60)
    counts = crops.draw(0).image.bincount()
    # Pictures 1 and 3 are the shrunk ones, of a quarter of the size, and drawn as often as the others.
    assert len(counts) == 4 and 230 < counts[1] + counts[3] < 370
    shrunk = list(PhotoPairs(PhotoSettings(str(tmp_path), crop_px=8, shrink=(2,)), 4, CPU))
    assert shrunk[0][0] == 2 and torch.equal(shrunk[0][1], resize(read_photo(tmp_path / "0.png"), 0.5))


def test_a_share_of_the_crops_is_of_one_colour(tmp_path: Path) -> None:
    save_synthetic_photos(tmp_path, 2)
    plain = PhotoCrops(PhotoSettings(str(tmp_path), crop_px=8, batch=400), 2, CPU)
    crops = PhotoCrops(PhotoSettings(str(tmp_path), crop_px=8, batch=400, flat=0.1), 2, CPU)
    flat = crops.draw(3).flat
    assert 15 <= flat.sum() <= 70
    for with_flat, without in zip(crops.batch(3), plain.batch(3), strict=True):
        assert torch.equal(with_flat[~flat], without[~flat])
        assert with_flat.is_contiguous(memory_format=torch.channels_last)
        colours = with_flat[flat].flatten(2)
        assert (colours == colours[..., :1]).all()
        assert (colours == 0).any() and (colours == 1).any()
        assert torch.equal((colours * 255).round() / 255, colours)
    assert torch.equal(*(batch[flat][..., 0, 0] for batch in crops.batch(3)))
    with pytest.raises(RedlineError, match="flat = 1.0 .* must be"):
        decode(PhotoSettings, {"photos": "x", "flat": 1.0}, "under [data]")


def test_recoloured_crops_are_what_the_bicubic_makes_of_recoloured_photos(tmp_path: Path) -> None:
    save_synthetic_photos(tmp_path, 2, 64, 72)
    plain = PhotoSettings(str(tmp_path), crop_px=12, batch=64)
    before, after = (PhotoCrops(replace(plain, recolour=share), 2, CPU, seed=3) for share in (0.0, 0.75))
    draw, (small, large), (new_small, new_large) = after.draw(1), before.batch(1), after.batch(1)
    for old, new in ((small, new_small), (large, new_large)):
        assert new.is_contiguous(memory_format=torch.channels_last) and new.min() >= 0 and new.max() <= 1
        mixed = torch.einsum("bij,bjhw->bihw", draw.mix, old) + draw.shift[..., None, None]
        torch.testing.assert_close(new, mixed)
    # The changed small picture is as near to what the bicubic makes of the changed large one as they were before.
    inner = slice(3, -3)
    rounded, off = ((resize(high, 1 / 2) - low)[..., inner, inner].abs().amax((1, 2, 3))
                    for high, low in ((large, small), (new_large, new_small)))  # fmt: skip
    assert (off <= rounded + 1e-5).all() and off.median() < 1 / 255
    changed = (draw.mix != torch.eye(3)).flatten(1).any(1)
    assert 0.5 < changed.float().mean() < 0.95
    assert torch.equal(new_large[~changed], large[~changed])
    # Every order of the channels, and some inverted.
    assert len({tuple(order) for order in draw.mix[changed].abs().argmax(2).tolist()}) == 6
    assert (draw.mix.sum((1, 2)) < 0).any()


def test_photos_are_shrunk_by_fractions_too(tmp_path: Path) -> None:
    save_synthetic_photos(tmp_path, 1, 60, 90)
    pairs = PhotoPairs(PhotoSettings(str(tmp_path), shrink=(1.5, 2), crop_px=8), 2, CPU)
    assert [(shrink, tuple(high.shape), tuple(low.shape)) for shrink, high, low, _ in pairs] == [
        (1.5, (3, 40, 60), (3, 20, 30)),
        (2, (3, 30, 44), (3, 15, 22)),
    ]


def test_bad_photos_are_said_and_skipped(tmp_path: Path) -> None:
    save_synthetic_photos(tmp_path, 1)
    save_photo(tmp_path / "small.png", synthetic_photo(31, 200, 0))
    whole = (tmp_path / "0.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "empty.jpg").write_bytes(b"")
    pairs = PhotoPairs(PhotoSettings(str(tmp_path), crop_px=8), 4, CPU)
    assert len(list(pairs)) == 1 and pairs.photos == 1
    assert len(pairs.skipped) == 3
    assert any("'small.png' is 200 × 31, but shrink 1 needs 32 pixels" in sentence for sentence in pairs.skipped)
    assert any("cut.png" in sentence for sentence in pairs.skipped)
    (tmp_path / "0.png").unlink()
    with pytest.raises(
        RedlineError, match="no photo of .* can be used for training. The first skipped photo: .*cut.png"
    ):
        list(PhotoPairs(PhotoSettings(str(tmp_path), crop_px=8), 4, CPU))


def test_folders_without_photos_and_impossible_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RedlineError, match="contains no images"):
        list(PhotoPairs(PhotoSettings(str(tmp_path)), 4, CPU))
    with pytest.raises(RedlineError, match="no folder"):
        list(PhotoPairs(PhotoSettings(str(tmp_path / "none")), 4, CPU))
    with pytest.raises(RedlineError, match="no training data"):
        PhotoSettings()
    with pytest.raises(RedlineError, match="shrink"):
        PhotoSettings("x", shrink=(2, 2))
    with pytest.raises(RedlineError, match="batch"):
        decode(PhotoSettings, {"photos": "x", "batch": 0}, "under [data]")


@pytest.mark.gpu
@pytest.mark.alone
def test_on_a_gpu_the_same_crops_and_more_than_a_thousand_a_second(tmp_path: Path) -> None:
    save_synthetic_photos(tmp_path, 2, 400, 371)
    settings = PhotoSettings(str(tmp_path), crop_px=64)
    crops, same = PhotoCrops(settings, 4, torch.device("cuda")), PhotoCrops(settings, 4, CPU)
    for seen, expected in zip(crops.batch(3), same.batch(3), strict=True):
        torch.testing.assert_close(seen.cpu(), expected, atol=1 / 254, rtol=0)
    torch.cuda.synchronize()
    began_s = time.perf_counter()
    for step in range(100):
        crops.batch(step)
    torch.cuda.synchronize()
    assert 100 * settings.batch / (time.perf_counter() - began_s) > 1000


def test_drawn_images_get_their_share_of_the_crops(tmp_path: Path) -> None:
    save_synthetic_photos(tmp_path / "photos", 3, 64, 64)
    save_synthetic_photos(tmp_path / "drawn", 1, 40, 40, seed=1)
    settings = PhotoSettings(str(tmp_path), crop_px=8, batch=1000, drawn=0.4)
    counts = PhotoCrops(settings, 4, CPU).draw(0).image.bincount()
    assert 340 < counts[0] < 460  # "drawn" is sorted before "photos"
    with pytest.raises(RedlineError, match="no subfolder 'drawn'"):
        PhotoCrops(replace(settings, photos=str(tmp_path / "photos")), 4, CPU)
    with pytest.raises(RedlineError, match="drawn = 1.0 .* must be"):
        decode(PhotoSettings, {"photos": "x", "drawn": 1.0}, "under [data]")


def test_photos_are_reduced_anew_in_every_round(tmp_path: Path) -> None:
    save_synthetic_photos(tmp_path, 2, 90, 100)
    save_photo(tmp_path / "small.png", synthetic_photo(31, 200, 0))
    settings = PhotoSettings(str(tmp_path), crop_px=8, batch=4, shrink=(1, 1.3), vary=0.5, renew_steps=10)
    crops = PhotoCrops(settings, 4, CPU, seed=1)
    assert crops.pairs.photos == 2 and crops.pairs.pixels == 2 * 90 * 100 and len(crops.pairs.skipped) == 1

    def sizes(round_: int) -> list[tuple[int, ...]]:
        return [tuple(variant.high.shape[1:]) for variant in crops.pairs.variants(round_) if variant.shrink > 1]

    assert len(set(sizes(0) + sizes(1))) == 4
    for height, width in sizes(2):
        assert height % 4 == width % 4 == 0 and 90 / 2.2 <= height <= 90 / 1.2 and 100 / 2.2 <= width <= 100 / 1.2
    # Whatever came before, a step's batch is the same.
    later = crops.batch(25)
    crops.batch(3)
    assert all(map(torch.equal, crops.batch(25), later))
    assert all(map(torch.equal, PhotoCrops(settings, 4, CPU, seed=1).batch(25), later))
    small, large = later
    assert small.shape == (4, 3, 8, 8) and large.shape == (4, 3, 32, 32)
    with pytest.raises(RedlineError, match="vary and renew_steps"):
        PhotoSettings("x", vary=0.1)

"""A DRCT starts as an interpolation, or with another's weights, all but the upsampling if its scale differs."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch.nn import functional as F

from redline.datasets.photo_pairs import PhotoSettings
from redline.errors import ModelError, RedlineError
from redline.models.drct import Drct, DrctConfig, save_drct
from redline.training.drct_start import linear_kernels, start_as_interpolation, start_from
from redline.training.loop import train
from redline.training.model_card import write_result
from redline.training.super_resolution import DrctLoopSettings, DrctSettings, DrctTask, DrctTraining
from synthetic_photos import save_synthetic_photos

CPU = torch.device("cpu")
SHAPE = DrctSettings(scale=2, groups=1, width=8, growth=4, features=6, window=4)


def saved(path: Path, scale: int, seed: int = 5, **others: int) -> Drct:
    torch.manual_seed(seed)
    shape = {"groups": 1, "width": 8, "growth": 4, "features": 6, "window": 4} | others
    model = Drct(DrctConfig.of(scale, **shape))
    save_drct(model, path)
    return model


def fresh(scale: int) -> Drct:
    torch.manual_seed(6)
    model = Drct(replace(SHAPE, scale=scale).config)
    start_as_interpolation(model)
    return model


@pytest.mark.parametrize(("scale", "of"), [(2, 4), (4, 2), (3, 4), (2, 2)])
def test_weights_of_equal_shape_are_loaded(scale: int, of: int, tmp_path: Path) -> None:
    theirs, model, untouched = saved(tmp_path / "w.safetensors", of), fresh(scale), fresh(scale)
    start = start_from(model, tmp_path / "w.safetensors")
    assert start.has_upsampling == (scale == of) and start.name == "w.safetensors" and f"×{of}" in start.model
    before, source = untouched.state_dict(), theirs.state_dict()
    for name, weight in model.state_dict().items():
        kept = name.startswith("upsample.") and scale != of
        assert torch.equal(weight, (before if kept else source)[name]), name
    # What was drawn is by no chance the same, so taking over and leaving alone are told apart.
    assert not torch.equal(before["conv_last.weight"], source["conv_last.weight"])


@pytest.mark.parametrize(
    ("others", "sentence"),
    [
        ({"groups": 2}, "its groups are 2, and the config says 1"),
        ({"width": 16}, "its width is 16, and the config says 8"),
        ({"features": 8}, "its features are 8, and the config says 6"),
        ({"window": 8}, "its window is 8, and the config says 4"),
    ],
)
def test_dimensions_that_do_not_fit_raise(others: dict[str, int], sentence: str, tmp_path: Path) -> None:
    saved(tmp_path / "w.safetensors", 4, **others)
    with pytest.raises(RedlineError, match=sentence):
        start_from(fresh(2), tmp_path / "w.safetensors")


def test_other_heads_are_refused_and_so_is_no_drct(tmp_path: Path) -> None:
    save_drct(Drct(replace(SHAPE.config, heads=(1, 1, 1, 1, 1))), tmp_path / "w.safetensors")
    with pytest.raises(RedlineError, match="its heads are 1/1/1/1/1, and the config says 4/6/2/4/6"):
        start_from(fresh(2), tmp_path / "w.safetensors")
    torch.save({"weight": torch.ones(2)}, tmp_path / "other.pth")
    with pytest.raises(ModelError, match="is not a DRCT model"):
        start_from(fresh(2), tmp_path / "other.pth")
    with pytest.raises(ModelError, match="cannot read"):
        start_from(fresh(2), tmp_path / "absent.pth")


@pytest.fixture
def settings(tmp_path: Path) -> DrctTraining:
    save_synthetic_photos(tmp_path / "photos", 2, 48, 53, seed=1)
    saved(tmp_path / "x4.safetensors", 4)
    model = replace(SHAPE, start=str(tmp_path / "x4.safetensors"))
    loop = DrctLoopSettings(steps=2, precision="fp32", log_every=1)
    return DrctTraining(model, PhotoSettings(str(tmp_path / "photos"), crop_px=8, batch=2), loop)


def test_unsuitable_weights_raise_before_photos_are_read(tmp_path: Path, settings: DrctTraining) -> None:
    elsewhere = replace(settings, model=replace(settings.model, groups=2), data=PhotoSettings("absent", crop_px=8))
    with pytest.raises(RedlineError, match="its groups are 1"):
        DrctTask(elsewhere, CPU)


def test_the_card_and_the_weights_say_where_it_began(tmp_path: Path, settings: DrctTraining) -> None:
    task = DrctTask(settings, CPU)
    result = write_result(task, train(task, settings.loop, tmp_path / "out", CPU), tmp_path / "out")
    card = result.card.read_text(encoding="utf-8")
    assert task.start is not None and f"It started from {task.start}." in card and task.start.sha256[:16] in card
    assert "all weights but those of the upsampling of `x4.safetensors`" in card and str(tmp_path) not in card
    with safe_open(result.weights, "pt") as file:
        about = file.metadata()
    assert json.loads(about["start"])["sha256"] == task.start.sha256
    assert json.loads(about["settings"])["model"]["start"] == "x4.safetensors"


def test_a_resumed_training_must_have_begun_with_the_same(tmp_path: Path, settings: DrctTraining) -> None:
    train(DrctTask(settings, CPU), settings.loop, tmp_path / "out", CPU)
    longer = replace(settings.loop, steps=3)
    (tmp_path / "elsewhere").mkdir()
    moved = (tmp_path / "x4.safetensors").rename(tmp_path / "elsewhere" / "renamed.safetensors")
    saved(tmp_path / "x4.safetensors", 4, seed=8)
    for start in (settings.model.start, ""):
        other = replace(settings, model=replace(settings.model, start=start))
        with pytest.raises(RedlineError, match="belongs to another training: its start is"):
            train(DrctTask(other, CPU), longer, tmp_path / "out", CPU, resume=True)
    same = replace(settings, model=replace(settings.model, start=str(moved)))
    assert train(DrctTask(same, CPU), longer, tmp_path / "out", CPU, resume=True).position.step == 3


def test_a_training_without_start_keeps_its_identity(settings: DrctTraining) -> None:
    plain = DrctTask(replace(settings, model=replace(settings.model, start="")), CPU)
    assert plain.start is None and plain.identity["start"] is None


def untrained(scale: int, features: int = 8) -> Drct:
    return Drct(DrctConfig.of(scale, 1, 12, 6, features=features, window=4))


@pytest.mark.parametrize("scale", [2, 3])
def test_one_step_is_linear_interpolation(scale: int) -> None:
    model = untrained(scale)
    picture = torch.rand(2, 3, 16, 12)
    before = model(picture)
    start_as_interpolation(model)
    seen, expected = model(picture), F.interpolate(picture, scale_factor=scale, mode="bilinear")
    inner = (..., slice(2 * scale, -2 * scale), slice(2 * scale, -2 * scale))
    torch.testing.assert_close(seen[inner], expected[inner], atol=1e-5, rtol=0)
    assert (before[inner] - expected[inner]).abs().max() > 0.1


def test_two_steps_interpolate_twice() -> None:
    model = untrained(4)
    start_as_interpolation(model)
    picture = torch.rand(1, 3, 12, 16)
    expected = picture
    for _ in range(2):
        expected = F.interpolate(expected, scale_factor=2, mode="bilinear")
    torch.testing.assert_close(model(picture)[..., 12:-12, 12:-12], expected[..., 12:-12, 12:-12], atol=1e-5, rtol=0)


def test_every_weight_learns() -> None:
    model = untrained(4)
    start_as_interpolation(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):  # what feeds a weight of zero learns from the second step on
        optimizer.zero_grad()
        (model(torch.rand(2, 3, 8, 8)) - torch.rand(2, 3, 32, 32)).abs().mean().backward()
        optimizer.step()
    still = [name for name, weight in model.named_parameters() if weight.grad is None or not weight.grad.any()]
    assert not still


@pytest.mark.parametrize("factor", [2, 3])
def test_kernels_sum_to_one(factor: int) -> None:
    kernels = linear_kernels(factor)
    assert kernels.shape == (factor**2, 3, 3)
    torch.testing.assert_close(kernels.sum((1, 2)), torch.ones(factor**2))


def test_too_few_features_are_refused() -> None:
    with pytest.raises(RedlineError, match="features = .* must be at least 6"):
        start_as_interpolation(untrained(2, features=4))

"""A DRCT trains from its settings to a scored file, resumes exactly, and refuses to be judged on what it has seen."""

import json
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from redline.errors import RedlineError
from redline.evaluation.super_resolution import evaluate, find_pairs
from redline.files.config_fields import decode
from redline.models.drct import Drct, load_drct
from redline.nn import SwitchableModule, WindowAttention
from redline.training.bundled import CONFIGS
from redline.training.loop import Progress, train
from redline.training.model_card import as_stored, write_result
from redline.training.precision import computing_in
from redline.training.super_resolution import DrctLoopSettings, DrctSettings, DrctTask, DrctTraining
from synthetic_photos import save_synthetic_photos

CPU = torch.device("cpu")
SETTINGS = """
[model]
scale = 2
groups = 1
width = 8
growth = 4
features = 6
window = 4

[data]
photos = "{folder}/photos"
validation = ["{folder}/test"]
crop_px = 8
batch = 4

[training]
steps = 6
precision = "fp32"
learning_rate = 2e-3
warmup_steps = 2
log_every = 2
"""


@pytest.fixture
def settings(tmp_path: Path) -> DrctTraining:
    save_synthetic_photos(tmp_path / "photos", 2, 48, 53, seed=1)
    save_synthetic_photos(tmp_path / "test", 2, 37, 42, seed=2)
    (tmp_path / "tiny.toml").write_text(SETTINGS.format(folder=tmp_path))
    return DrctTraining.read(tmp_path / "tiny.toml")


def interrupt_at(step: int, progress: Progress) -> None:
    if progress.step == step:
        signal.raise_signal(signal.SIGINT)


def test_arguments_override_the_config(tmp_path: Path, settings: DrctTraining) -> None:
    assert settings.model.config.groups == 1 and settings.data.crop_px == 8 and settings.loop.steps == 6
    timed = DrctTraining.read(
        tmp_path / "tiny.toml", minutes=3.0, photos="elsewhere", validation=["a", "b"], steps=None
    )
    assert timed.loop.minutes == 3 and timed.loop.steps is None
    assert timed.data.photos == "elsewhere" and timed.data.validation == ("a", "b")
    with pytest.raises(RedlineError, match="multiple of the model's window, 4"):
        replace(settings, data=replace(settings.data, crop_px=10))
    with pytest.raises(RedlineError, match="weights = 'int8' .* must be one of fp16, fp32"):
        decode(DrctSettings, {"weights": "int8"}, "under [model]")


def test_resumed_equals_uninterrupted_bit_for_bit(tmp_path: Path, settings: DrctTraining) -> None:
    whole = train(DrctTask(settings, CPU), settings.loop, tmp_path / "whole", CPU)
    first = train(
        DrctTask(settings, CPU), settings.loop, tmp_path / "parts", CPU, on_progress=lambda seen: interrupt_at(4, seen)
    )
    assert first.interrupted and first.position.step == 4
    torch.manual_seed(777)
    second = train(DrctTask(settings, CPU), settings.loop, tmp_path / "parts", CPU, resume=True)
    pairs = zip(whole.model.state_dict().values(), second.model.state_dict().values(), strict=True)
    assert second.position.step == 6 and all(torch.equal(one, other) for one, other in pairs)
    wider = replace(settings, data=replace(settings.data, batch=5))
    with pytest.raises(RedlineError, match="its batch is 4, not 5"):
        train(DrctTask(wider, CPU), settings.loop, tmp_path / "parts", CPU, resume=True)


def test_the_result_is_the_averaged_model_scored_as_stored(tmp_path: Path, settings: DrctTraining) -> None:
    task = DrctTask(settings, CPU)
    outcome = train(task, settings.loop, tmp_path / "out", CPU)
    result = write_result(task, outcome, tmp_path / "out")
    loaded = load_drct(result.weights)
    for one, other in zip(loaded.parameters(), outcome.model.parameters(), strict=True):
        assert torch.equal(one, other.half().float())
    seen = evaluate(loaded, find_pairs(tmp_path / "test"), 2, window=4).mean
    (folder,) = result.scores
    assert result.scores[folder].mean == seen
    with safe_open(result.weights, "pt") as file:
        about = file.metadata()
    assert json.loads(about["scores"])["test"]["psnr_y_db"] == seen.psnr_y_db
    assert about["steps"] == "6" and json.loads(about["settings"])["data"]["photos"] == "photos"
    card = result.card.read_text(encoding="utf-8")
    assert f"**{seen.psnr_y_db:.2f}**" in card and f"{result.parameters:,} parameters" in card
    assert f"{result.bicubic[folder].mean.psnr_y_db:.2f}" in card and "6 steps of 4 crops" in card
    assert "The folder of photos has no licence file" in card
    assert str(tmp_path) not in card and str(tmp_path) not in about["settings"]


def test_without_a_test_set_nothing_is_claimed(tmp_path: Path, settings: DrctTraining) -> None:
    blind = replace(settings, data=replace(settings.data, validation=()), loop=replace(settings.loop, steps=1))
    task = DrctTask(blind, CPU)
    assert task.validate(task.model) == {}
    result = write_result(task, train(task, blind.loop, tmp_path / "out", CPU), tmp_path / "out")
    assert "nothing was scored" in result.card.read_text(encoding="utf-8")


def test_a_test_set_among_the_photos_is_refused(tmp_path: Path, settings: DrctTraining) -> None:
    shutil.copy(tmp_path / "test" / "1.png", tmp_path / "photos" / "renamed.png")
    with pytest.raises(RedlineError, match="'1.png' of the test set .* is a training photo"):
        DrctTask(settings, CPU)


@pytest.mark.cpu
def test_bf16_falls_back_to_fp32_with_a_warning(settings: DrctTraining, monkeypatch: pytest.MonkeyPatch) -> None:
    from redline.training import precision

    half = replace(settings, loop=replace(settings.loop, precision="bf16"))
    exact = DrctTask(settings, CPU).loss(0).item()
    monkeypatch.setattr(precision.Machine, "detect", lambda device: type("Old", (), {"hardware_dtypes": ("fp32",)}))
    with pytest.warns(UserWarning, match="cpu has no bf16 in hardware"):
        task = DrctTask(half, CPU)
    assert task.precision == "fp32" and task.loss(0).item() == exact
    new = type("New", (), {"hardware_dtypes": ("bf16",), "is_cuda": True})
    monkeypatch.setattr(precision.Machine, "detect", lambda device: new)
    task = DrctTask(half, CPU)
    assert task.precision == "bf16" and task.loss(0).item() != exact
    assert task.loss(0).item() == pytest.approx(exact, rel=0.05)


def test_a_weight_beyond_fp16_is_refused() -> None:
    model = Drct(DrctSettings(groups=1, width=8, growth=4, features=4, window=4).config)
    with torch.no_grad():
        model.conv_last.weight[0, 0, 0, 0] = 1e6
    with pytest.raises(RedlineError, match="too large for fp16"):
        as_stored(model, torch.float16)
    assert as_stored(model, torch.float32).conv_last.weight[0, 0, 0, 0] == 1e6


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("drct-*.toml")), ids=lambda path: path.stem)
def test_the_bundled_settings_are_of_a_small_model(path: Path) -> None:
    settings = DrctTraining.read(path, photos="photos")
    with torch.device("meta"):
        parameters = sum(weight.numel() for weight in Drct(settings.model.config).parameters())
    assert path.stem.endswith(f"-x{settings.model.scale}") and settings.model.weights == "fp16"
    assert parameters <= 1_500_000 and 2 * parameters < 8_000_000


def test_there_are_bundled_settings() -> None:
    assert {path.stem for path in CONFIGS.glob("drct-*.toml")} == {"drct-small-x2", "drct-small-x4"}


@pytest.mark.slow
def test_it_learns_to_beat_bicubic(tmp_path: Path, settings: DrctTraining) -> None:
    save_synthetic_photos(tmp_path / "photos", 8, 128, 128, seed=3)
    save_synthetic_photos(tmp_path / "test", 3, 80, 90, seed=4)
    model = replace(settings.model, width=16, growth=8, features=16)
    loop = replace(settings.loop, steps=250, learning_rate=3e-3, warmup_steps=20, ema_decay=0.98)
    task = DrctTask(replace(settings, model=model, data=replace(settings.data, batch=8, crop_px=16)), CPU)
    (start,) = task.evaluate(task.model).values()
    result = write_result(task, train(task, loop, tmp_path / "out", CPU), tmp_path / "out")
    (learnt,), (bicubic,) = result.scores.values(), result.bicubic.values()
    assert start.mean.psnr_y_db < bicubic.mean.psnr_y_db
    assert learnt.mean.psnr_y_db > bicubic.mean.psnr_y_db + 0.15
    assert learnt.mean.ssim_y > bicubic.mean.ssim_y


def test_on_a_cpu_scores_are_those_of_the_plain_operations(tmp_path: Path, settings: DrctTraining) -> None:
    """And who trains with which kernels may change on the way."""
    task = DrctTask(settings, CPU)
    assert {module.implementation for module in task.model.modules() if isinstance(module, SwitchableModule)} == {
        "reference"
    }
    plain = DrctTask(replace(settings, loop=replace(settings.loop, fused_ops=False, compile=False)), CPU)
    assert plain.identity == task.identity


# What the compiler warns of differs from version to version, and is none of these tests' business.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("compiled", [False, True])
def test_fused_ops_give_the_gradients_of_plain_ones(precision: str, compiled: bool, settings: DrctTraining) -> None:
    gpu, gradients, losses = torch.device("cuda"), [], []
    model = replace(settings.model, width=24, growth=8, features=12, window=8)
    loop = replace(settings.loop, precision=precision, compile=compiled)
    for fused in (False, True):
        chosen = replace(loop, fused_ops=fused, compile=compiled and fused)
        task = DrctTask(replace(settings, model=model, loop=chosen), gpu)
        used = {
            module.active_implementation() for module in task.model.modules() if isinstance(module, WindowAttention)
        }
        assert used == {"triton" if fused else "reference"}
        random = torch.Generator().manual_seed(3)
        with torch.no_grad():  # as it starts, nothing of the body reaches the output
            for weight in task.model.parameters():
                weight += 0.1 * torch.randn(weight.shape, generator=random).to(gpu)
        small, large = task.crops.batch(0)
        with computing_in(precision, gpu):
            output = task.model(small)
        # Squares, because the gradient of an absolute error turns round where rounding does.
        loss = (output.float() - large).square().mean()
        loss.backward()
        losses.append(loss.item())
        gradients.append([weight.grad.double() for weight in task.model.parameters()])
    limit = 1e-3 if precision == "fp32" else 0.15
    assert losses[1] == pytest.approx(losses[0], rel=limit)
    names = [name for name, _ in task.model.named_parameters()]
    for name, one, other in zip(names, *gradients, strict=True):
        assert (one - other).norm() <= limit * one.norm(), name


def test_frequencies_count_from_their_share_of_the_steps_on(settings: DrctTraining) -> None:
    loop = replace(settings.loop, frequency_weight=2.0, frequency_from=0.5)
    plain, task = (DrctTask(replace(settings, loop=one), torch.device("cpu")) for one in (settings.loop, loop))
    assert torch.equal(task.loss(2), plain.loss(2)) and not task.penalties(2)
    small, large = task.crops.batch(3)
    error = torch.fft.fft2(task.model(small) - large, norm="ortho")[..., : large.shape[-1] // 2 + 1]
    expected = plain.loss(3) + 2 * (error.real.abs() + error.imag.abs()).mean() / 2
    torch.testing.assert_close(task.loss(3), expected)
    assert task.penalties(3) == ("frequencies",)
    assert "frequency_weight" in task.identity and "frequency_weight" not in plain.identity
    with pytest.raises(RedlineError, match="frequency_from is a fraction of the steps"):
        replace(loop, steps=None, minutes=1.0)
    with pytest.raises(RedlineError, match="frequency_from = 1.5 .*at most 1"):
        decode(DrctLoopSettings, {"steps": 1, "frequency_from": 1.5}, "under [training]")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.gpu
def test_a_captured_graph_follows_the_loss(settings: DrctTraining) -> None:
    loop = replace(settings.loop, frequency_weight=2.0, frequency_from=0.5)
    gpu = torch.device("cuda")
    task = DrctTask(replace(settings, loop=loop), gpu)
    for step in (2, 3, 4):
        expected = task.loss(step).item()
        assert task.backward(step, 0, task.arithmetic).item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.gpu
def test_compiled_bf16_training_learns_on_a_gpu(tmp_path: Path, settings: DrctTraining) -> None:
    gpu = torch.device("cuda")
    model = replace(settings.model, groups=2, width=16, growth=8, features=16)
    save_synthetic_photos(tmp_path / "photos", 8, 128, 128, seed=3)
    loop = replace(settings.loop, steps=300, learning_rate=3e-3, warmup_steps=20, ema_decay=0.98)
    loop = replace(loop, precision="bf16", compile=True)
    data = replace(settings.data, batch=8, crop_px=16)
    task = DrctTask(replace(settings, model=model, data=data, loop=loop), gpu)
    (start,) = task.evaluate(task.model).values()
    outcome = train(task, loop, tmp_path / "out", gpu)
    (learnt,) = task.evaluate(outcome.model).values()
    assert learnt.mean.psnr_y_db > start.mean.psnr_y_db

"""An LSD learns to restore clips through its three stages, resumes exactly, and is judged on photos it never saw."""

import copy
import json
import math
import shutil
import signal
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from redline.datasets.clips.clips import Frame
from redline.errors import RedlineError
from redline.files.config_fields import decode
from redline.models.lsd import SIZES, Lsd, load_lsd, read_about
from redline.training.bundled import CONFIGS
from redline.training.loop import Progress, train
from redline.training.lsd import task as module
from redline.training.lsd.loss import corrupted, difference, weights_by_input
from redline.training.lsd.settings import LsdLoopSettings, LsdSettings, LsdTraining, StageSettings
from redline.training.lsd.task import LsdTask
from redline.training.lsd.validation import judge, psnr_db, restorer
from redline.training.model_card import write_result
from synthetic_photos import save_synthetic_photos

CPU = torch.device("cpu")


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


def test_arguments_override_the_config(tmp_path: Path, settings: LsdTraining) -> None:
    config = settings.model.config
    assert (config.width, config.patch, config.multipliers, config.control) == (8, 2, (1, 2), SIZES["tiny"].control)
    timed = LsdTraining.read(tmp_path / "lsd.toml", minutes=3.0, photos="elsewhere", validation=["a"], steps=None)
    assert timed.loop.minutes == 3 and timed.loop.steps is None
    assert timed.data.photos == "elsewhere" and timed.data.validation == ("a",)
    with pytest.raises(RedlineError, match="frame_px = 18 .* must be a multiple of 4"):
        replace(settings, data=replace(settings.data, frame_px=18))
    for wrong, message in (
        ({"rollouts_from": 0.9}, "rollouts_from .* must not be larger than distillation_from"),
        ({"frames": 1}, "frames = 1 .*at least 2"),
        ({"sample_steps": 5}, "sample_steps = 5 .*at least 1 and at most 4"),
        ({"corruption": 2.0}, "corruption = 2.0 .*at most 1"),
        ({"steadiness": -1.0}, "steadiness = -1.0 .*at least 0"),
    ):
        with pytest.raises(RedlineError, match=message):
            decode(StageSettings, wrong, "under [stages]")
    with pytest.raises(RedlineError, match="unknown LSD size 'vast'"):
        _ = LsdSettings(size="vast").config
    assert decode(LsdLoopSettings, {"steps": 1, "optimizer": "adamw8bit"}, "under [training]").optimizer == "adamw8bit"
    with pytest.raises(RedlineError, match="precision = 'fp8' .* must be one of bf16, fp16, fp32"):
        decode(LsdLoopSettings, {"steps": 1, "precision": "fp8"}, "under [training]")


def test_stages_begin_at_their_shares() -> None:
    stages = StageSettings(rollouts_from=0.3, distillation_from=0.6)
    assert [stages.at(share) for share in (0.0, 0.29, 0.3, 0.59, 0.6, 1.0)] == (
        ["diffusion"] * 2 + ["rollouts"] * 2 + ["distillation"] * 2
    )
    never = StageSettings(rollouts_from=1.0, distillation_from=1.0)
    assert never.at(1.0) == "diffusion"


def test_it_learns_to_restore(tmp_path: Path, settings: LsdTraining) -> None:
    """Seconds on a CPU: the loss falls, and the film is better than what the camera gave."""
    save_synthetic_photos(tmp_path / "photos", 4, 64, 71, seed=3)
    data = replace(settings.data, batch=4)
    loop = replace(settings.loop, steps=60, learning_rate=5e-3, warmup_steps=5, ema_decay=0.9, log_every=10)
    stages = replace(settings.stages, rollouts_from=0.85, distillation_from=0.95)
    task = LsdTask(replace(settings, model=replace(settings.model, width=16), data=data, stages=stages, loop=loop), CPU)
    (start,) = task.judge(task.model, 8).values()
    seen: list[Progress] = []
    outcome = train(task, loop, tmp_path / "out", CPU, on_progress=seen.append)
    (learnt,) = task.judge(outcome.model, 8).values()
    losses = [progress.loss for progress in seen]
    assert sum(losses[3:5]) / 2 < 0.95 * losses[0] and all(math.isfinite(loss) for loss in losses)
    assert task.stage == "distillation"
    assert learnt.psnr_db > learnt.input_psnr_db + 0.3 and learnt.psnr_db > start.psnr_db + 0.3
    assert learnt.input_psnr_db == start.input_psnr_db


def test_resumed_equals_uninterrupted_bit_for_bit(tmp_path: Path, settings: LsdTraining) -> None:
    whole = train(LsdTask(settings, CPU), settings.loop, tmp_path / "whole", CPU)
    for stop in (1, 3, 5):  # one in each stage

        def interrupt(progress: Progress, at: int = stop) -> None:
            if progress.step == at:
                signal.raise_signal(signal.SIGINT)

        folder = tmp_path / f"parts{stop}"
        first = train(LsdTask(settings, CPU), settings.loop, folder, CPU, on_progress=interrupt)
        assert first.interrupted and first.position.step == stop
        torch.manual_seed(777)
        second = train(LsdTask(settings, CPU), settings.loop, folder, CPU, resume=True)
        assert second.position.step == 6 and same(second.model, whole.model)
    other = replace(settings, stages=replace(settings.stages, frames=3))
    with pytest.raises(RedlineError, match="its frames is 2, not 3"):
        train(LsdTask(other, CPU), settings.loop, folder, CPU, resume=True)


def test_the_teacher_follows_until_it_teaches(settings: LsdTraining) -> None:
    task = LsdTask(settings, CPU)
    before = copy.deepcopy(task.networks.teacher)
    with torch.no_grad():
        for weight in task.networks.student.parameters():
            weight += 0.1
    task.loss(0)
    assert task.stage == "diffusion" and not same(before, task.networks.teacher)
    task.loss(3)
    assert task.stage == "rollouts"
    taught = copy.deepcopy(task.networks.teacher)
    loss = task.loss(4)
    assert task.stage == "distillation" and same(taught, task.networks.teacher)
    loss.backward()
    assert all(weight.grad is None for weight in task.networks.teacher.parameters())
    assert any(weight.grad is not None for weight in task.networks.student.parameters())
    optimized = {id(weight) for group in task.optimizer().param_groups for weight in group["params"]}
    assert optimized == {id(weight) for weight in task.networks.student.parameters()}


def test_every_stage_trains_every_weight(settings: LsdTraining) -> None:
    task = LsdTask(replace(settings, data=replace(settings.data, batch=8)), CPU)
    for step, stage in ((0, "diffusion"), (2, "rollouts"), (4, "distillation")):
        task.networks.zero_grad(set_to_none=True)
        for offset in (0, 1):
            task.loss(step + offset).backward()
        assert task.stage == stage
        for name, weight in task.networks.student.named_parameters():
            assert weight.grad is not None and weight.grad.isfinite().all(), (stage, name)
            assert weight.grad.abs().max() > 0, (stage, name)


def test_the_untrained_model_nearly_returns_the_frame(settings: LsdTraining) -> None:
    (start,) = LsdTask(settings, CPU).judge(LsdTask(settings, CPU).model, 4).values()
    assert abs(start.gain_db) < 0.5 and start.gain_db != 0


def test_a_clip_counts_by_how_much_better_it_gets() -> None:
    """A dark clip is far off and a good one near: left as they are, both count the same, and about 1."""
    target = torch.rand(2, 3, 8, 8) * 2 - 1
    seen = target + torch.tensor([0.8, 0.08])[:, None, None, None] * torch.randn_like(target).sign()
    weights = weights_by_input(seen, target)
    each = [difference(seen[i : i + 1], target[i : i + 1], weights[i : i + 1]) for i in range(2)]
    assert each[0] == pytest.approx(1.0, abs=0.05) and each[1] == pytest.approx(1.0, abs=0.5)
    assert difference(target, target, weights_by_input(target, target)) == 0
    assert weights_by_input(target, target).max() < 40


def test_history_is_its_own_output(settings: LsdTraining, monkeypatch: pytest.MonkeyPatch) -> None:
    stages = replace(settings.stages, rollouts_from=0.0, distillation_from=1.0, frames=3, corruption=0.0)
    task = LsdTask(replace(settings, stages=stages), CPU)
    given, said = [], []
    predict = task._predict

    def watched(network: torch.nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
        given.append((inputs[1], inputs[2]))
        said.append(predict(network, *inputs))
        return said[-1]

    monkeypatch.setattr(task, "_predict", watched)
    task.loss(0)
    assert len(given) == 3 and torch.equal(given[0][1], given[0][0])
    assert torch.equal(given[1][1], said[0].clamp(-1, 1)) and torch.equal(given[2][1], said[1].clamp(-1, 1))
    assert not given[1][1].requires_grad


def test_corruption_is_of_a_share_and_never_wild() -> None:
    pictures = torch.rand(200, 3, 12, 14) * 2 - 1
    same_again = [corrupted(pictures, 0.5, torch.Generator().manual_seed(3)) for _ in range(2)]
    assert torch.equal(*same_again)
    touched = (same_again[0] != pictures).flatten(1).any(1)
    assert 70 < touched.sum() < 130
    assert same_again[0].min() >= -1 and same_again[0].max() <= 1
    assert torch.equal(corrupted(pictures, 0.0, torch.Generator().manual_seed(3)), pictures)
    assert not torch.equal(*(corrupted(pictures, 1.0, torch.Generator().manual_seed(seed)) for seed in (1, 2)))


class Given:
    """A clip that is made by hand."""

    def __init__(self, frames: list[Frame]) -> None:
        self.frames = frames
        self.scene = type("Scene", (), {"photos": torch.zeros(2, len(frames[0].clean), 3, 8, 8)})

    def __len__(self) -> int:
        return len(self.frames)

    def __iter__(self):
        return iter(self.frames)


def test_figures_say_which_arm_is_good_steady_and_drifting() -> None:
    """A still scene with a noisy camera: arms whose quality is known are judged as what they are."""
    clean, still = torch.rand(2, 3, 8, 8), torch.zeros(2, 8, 8, 2)
    place = (torch.arange(8) + 0.5 - 4).float()
    still[..., 0], still[..., 1] = place[None, None, :], place[None, :, None]
    frames = [Frame(clean, clean + 0.1 * torch.randn_like(clean), still, torch.ones(2, 8, 8)) for _ in range(8)]
    clip = Given(frames)

    def averaging(frame: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        return 0.3 * frame + 0.7 * previous

    seen = judge(averaging, clip, 1)
    assert (seen.clips, seen.frames, seen.steps) == (2, 8, 1)
    assert seen.psnr_db > seen.input_psnr_db + 1 and seen.alone_psnr_db == pytest.approx(seen.input_psnr_db)
    assert seen.gain_db == seen.psnr_db - seen.input_psnr_db
    assert seen.warp_error < 0.6 * seen.alone_warp_error and seen.clean_warp_error < 1e-6
    assert seen.alone_warp_error == pytest.approx(seen.input_warp_error)
    assert seen.drift_db < 0
    assert judge(lambda frame, previous: previous * 0.9, clip, 1).drift_db > 1
    expected = -10 * math.log10(float((frames[0].seen - clean)[0].square().mean()))
    assert float(psnr_db(frames[0].seen[:1], clean[:1])) == pytest.approx(expected, rel=1e-5)


def test_a_restorer_uses_frame_and_history(settings: LsdTraining) -> None:
    model = Lsd(settings.model.config).eval()
    restore = restorer(model, 2, 1, 16, CPU)
    frame, previous = torch.rand(2, 1, 3, 16, 16)
    with torch.no_grad():
        output = restore(frame, previous)
        assert torch.equal(output, restore(frame, previous)) and output.min() >= 0 and output.max() <= 1
        assert not torch.equal(output, restore(frame, frame)) and not torch.equal(output, restore(previous, previous))


def test_the_result_is_the_averaged_student_scored_as_stored(tmp_path: Path, settings: LsdTraining) -> None:
    half = replace(settings, model=replace(settings.model, weights="fp16"))
    task = LsdTask(half, CPU)
    outcome = train(task, half.loop, tmp_path / "out", CPU)
    result = write_result(task, outcome, tmp_path / "out")
    loaded = load_lsd(result.weights)
    assert isinstance(outcome.model, Lsd), "an average of the teacher would be memory for nothing"
    for one, other in zip(loaded.parameters(), outcome.model.parameters(), strict=True):
        assert torch.equal(one, other.half().float())
    (again,) = task.judge(loaded, 8).values()
    assert again.frames == 8 and asdict(result.scores["test"]) == pytest.approx(asdict(again), abs=1e-4)
    about = read_about(result.weights)
    assert json.loads(about["scores"])["test"]["psnr_db"] == result.scores["test"].psnr_db
    assert about["stage"] == result.stage == "distillation" and about["steps"] == "6"
    card = result.card.read_text(encoding="utf-8")
    assert f"**{again.psnr_db:.2f}**" in card and "diffusion, rollouts, distillation" in card
    assert str(tmp_path) not in card and str(tmp_path) not in about["settings"]


def test_a_training_photo_in_a_test_set_raises(tmp_path: Path, settings: LsdTraining) -> None:
    shutil.copy(tmp_path / "test" / "1.png", tmp_path / "photos" / "renamed.png")
    with pytest.raises(RedlineError, match="contains a training photo"):
        LsdTask(settings, CPU)


def test_with_minutes_stages_follow_the_clock_after_resuming_too(
    settings: LsdTraining, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    task = LsdTask(replace(settings, loop=replace(settings.loop, steps=None, minutes=1.0)), CPU)
    stages = []
    for elapsed_s in (0, 15, 30, 45):
        now[0] = 100.0 + elapsed_s
        task.loss(3)
        stages.append(task.stage)
    assert stages == ["diffusion", "diffusion", "rollouts", "distillation"]
    resumed = LsdTask(task.settings, CPU)
    resumed.networks.load_state_dict(task.networks.state_dict())
    now[0] = 5000.0
    resumed.loss(3)
    assert resumed.stage == "distillation"


def test_without_distillation_there_is_no_teacher_to_keep(tmp_path: Path, settings: LsdTraining) -> None:
    stages = replace(settings.stages, distillation_from=1.0)
    task = LsdTask(replace(settings, stages=stages, loop=replace(settings.loop, checkpointing=True)), CPU)
    assert task.networks.teacher is None and task.networks.student.encoder[0].recomputes
    train(task, replace(settings.loop, steps=4), tmp_path / "out", CPU)
    assert task.stage == "rollouts"
    unaided = LsdTask(replace(settings, stages=replace(settings.stages, teacher_share=0.0)), CPU)
    assert unaided.networks.teacher is None and unaided.loss(5).isfinite() and unaided.stage == "distillation"


def test_without_control_it_trains_too(settings: LsdTraining) -> None:
    task = LsdTask(replace(settings, model=replace(settings.model, control=0)), CPU)
    assert task.loss(0).isfinite()


def test_fp16_scales_its_loss_and_trains_fp32_weights(
    tmp_path: Path, settings: LsdTraining, monkeypatch: pytest.MonkeyPatch
) -> None:
    from redline.training import precision

    new = type("New", (), {"hardware_dtypes": ("fp16",), "is_cuda": True})
    monkeypatch.setattr(precision.Machine, "detect", lambda device: new)
    half = replace(settings, loop=replace(settings.loop, precision="fp16", steps=3))
    task = LsdTask(half, CPU)
    assert task.arithmetic.precision == "fp16"
    before = copy.deepcopy(task.networks.student)
    outcome = train(task, half.loop, tmp_path / "out", CPU)
    assert {weight.dtype for weight in task.networks.parameters()} == {torch.float32}
    assert {weight.dtype for weight in task.computing.parameters()} == {torch.float16}
    assert outcome.position.step == 3
    if outcome.position.skipped < 3:
        assert not same(before, task.networks.student)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("lsd-*.toml")), ids=lambda path: path.stem)
def test_bundled_configs_are_valid(path: Path) -> None:
    settings = LsdTraining.read(path, photos="photos")
    assert path.stem == f"lsd-{settings.model.size}" and settings.model.config == SIZES[settings.model.size]
    assert settings.stages.rollouts_from < settings.stages.distillation_from < 1
    assert settings.loop.final_frames >= 1000

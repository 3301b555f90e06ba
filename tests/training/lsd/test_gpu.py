"""An LSD trains on a GPU: compiled, in half precision, within its memory, and without waiting for the device."""

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from redline.training.ema import Ema
from redline.training.loop import train
from redline.training.lsd.settings import LsdSettings, LsdTraining
from redline.training.lsd.task import LsdTask
from redline.training.optimizers import step_unless
from synthetic_photos import save_synthetic_photos


@pytest.mark.gpu
def test_compiled_training_learns_on_a_gpu_as_plain_fp32_does(tmp_path: Path, settings: LsdTraining) -> None:
    """200 steps gain 0.88 dB in fp32 on a CPU; what differs from it by more than noise is no rounding."""
    gpu = torch.device("cuda")
    save_synthetic_photos(tmp_path / "photos", 8, 128, 128, seed=3)
    data = replace(settings.data, frame_px=64, world_px=96, batch=8)
    save_synthetic_photos(tmp_path / "test", 2, 128, 128, seed=4)
    model, learnt = replace(settings.model, width=32, patch=4, multipliers=(1, 2, 4)), {}
    for precision in ("fp32", "bf16", "fp16"):
        loop = replace(settings.loop, steps=200, precision=precision, learning_rate=3e-3, ema_decay=0.97)
        loop = replace(loop, compile=precision != "fp32")
        task = LsdTask(replace(settings, model=model, data=data, loop=loop), gpu)
        outcome = train(task, loop, tmp_path / precision, gpu)
        (learnt[precision],) = task.judge(outcome.model, 16).values()
        assert outcome.position.skipped < 20
    exact = learnt["fp32"]
    assert exact.psnr_db > exact.input_psnr_db + 0.7
    for one in learnt.values():
        assert one.psnr_db == pytest.approx(exact.psnr_db, abs=0.1)
        assert one.warp_error == pytest.approx(exact.warp_error, rel=0.05)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("optimizer", "distillation_from"),
    [("adamw", 1.0), pytest.param("adamw8bit", 0.0, marks=pytest.mark.slow)],
    ids=["rollouts", "with a teacher"],
)
def test_medium_trains_within_8_gib(
    tmp_path: Path, settings: LsdTraining, optimizer: str, distillation_from: float
) -> None:
    """Weights, their average, gradients and moments; with a teacher besides, moments are of 8 bits."""
    if optimizer == "adamw8bit":
        pytest.importorskip("torchao")
    gpu = torch.device("cuda")
    save_synthetic_photos(tmp_path / "photos", 2, 128, 128, seed=3)
    save_synthetic_photos(tmp_path / "test", 2, 128, 128, seed=4)
    data = replace(settings.data, frame_px=64, world_px=96, batch=1)
    loop = replace(settings.loop, precision="bf16", checkpointing=True, optimizer=optimizer)
    stages = replace(settings.stages, rollouts_from=0.0, distillation_from=distillation_from)
    gc.collect()
    torch.cuda.empty_cache()
    held = torch.cuda.memory_allocated()
    task = LsdTask(LsdTraining(LsdSettings(size="medium"), data, stages, loop), gpu)
    average, stepping = Ema(task.averaged, 0.999), task.optimizer()
    torch.cuda.reset_peak_memory_stats()
    for step in range(3):
        task.loss(step).backward()
        norm = torch.nn.utils.clip_grad_norm_(task.model.parameters(), 1.0)
        step_unless(~norm.isfinite(), stepping)
        stepping.zero_grad(set_to_none=True)
        average.update(step + 1)
    assert (task.networks.teacher is None) == (distillation_from == 1)
    assert torch.cuda.max_memory_allocated() - held < 8 * 2**30


@pytest.mark.gpu
def test_a_step_waits_for_nothing(
    settings: LsdTraining, waits_for_nobody: Callable[[], AbstractContextManager[None]]
) -> None:
    task = LsdTask(settings, torch.device("cuda"))
    for step in range(6):
        task.loss(step).backward()
    with waits_for_nobody():
        for step in range(6):
            task.loss(step).backward()

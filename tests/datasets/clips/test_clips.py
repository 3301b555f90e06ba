"""Clips are the same for the same seed and step, and cost the random state of nobody else."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from goldens import check_golden
from redline.datasets.clips import Clips, ClipSettings, Degradation
from redline.datasets.clips.scene import Scene
from redline.errors import RedlineError
from redline.files.config_fields import decode
from synthetic_photos import save_synthetic_photos

CPU = torch.device("cpu")


@pytest.fixture
def settings(tmp_path: Path) -> ClipSettings:
    save_synthetic_photos(tmp_path, 3, 70, 81)
    return ClipSettings(str(tmp_path), frame_px=24, world_px=48, batch=2, cuts=0.5)


def test_frames_are_quantized_to_8_bits(settings: ClipSettings) -> None:
    clip = Clips(settings, CPU).clip(0, 3)
    frames = list(clip)
    assert len(frames) == len(clip) == 3
    for frame in frames:
        assert frame.clean.shape == frame.seen.shape == (2, 3, 24, 24)
        assert frame.came_from.shape == (2, 24, 24, 2) and frame.known.shape == (2, 24, 24)
        assert frame.clean.min() >= 0 and frame.clean.max() <= 1
        torch.testing.assert_close((frame.seen * 255).round() / 255, frame.seen)
        assert (frame.seen - frame.clean).abs().mean() > 1e-3
    with pytest.raises(IndexError):
        clip[3]


def test_a_step_is_always_the_same_and_others_are_not(settings: ClipSettings) -> None:
    one, two = Clips(settings, CPU, seed=4), Clips(settings, CPU, seed=4)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first, again = one.clip(9, 4), two.clip(9, 4)
    frames = list(first)
    assert torch.equal(torch.get_rng_state(), state)
    # In any order: a frame does not depend on those that were made before it.
    for index in (3, 0, 2):
        assert torch.equal(again[index].seen, frames[index].seen)
        assert torch.equal(again[index].came_from, frames[index].came_from)
    assert not torch.equal(one.clip(10, 4)[0].clean, frames[0].clean)
    assert not torch.equal(Clips(settings, CPU, seed=5).clip(9, 4)[0].clean, frames[0].clean)


def test_noise_is_new_in_every_frame(settings: ClipSettings) -> None:
    still = replace(settings, still=1.0, objects=0.0, cuts=0.0, noise=0.2)
    clip = Clips(still, CPU).clip(3, 2)
    assert torch.equal(clip[0].clean, clip[1].clean) and not torch.equal(clip[0].seen, clip[1].seen)


def test_impossible_settings_are_refused(tmp_path: Path) -> None:
    for wrong, sentence in (
        ({"photos": ""}, "no training data"),
        ({"frame_px": 4}, "frame_px = 4 .*at least 8"),
        ({"world_px": 100}, "world_px = 100 must be at least frame_px"),
        ({"batch": 0}, "batch = 0 .*at least 1"),
        ({"objects": 1.5}, "objects = 1.5 .*at least 0 and at most 1"),
        ({"dark": 1.0}, "dark = 1.0 .*less than 1"),
        ({"pan_px": -1.0}, "pan_px = -1.0 .*at least 0"),
        ({"quality": 0}, "quality = 0 .*at least 1 and at most 100"),
    ):
        with pytest.raises(RedlineError, match=sentence):
            decode(ClipSettings, {"photos": "x", **wrong}, "under [data]")
    save_synthetic_photos(tmp_path, 1, 40, 40)
    with pytest.raises(RedlineError, match="can be used for training"):
        Clips(ClipSettings(str(tmp_path), frame_px=24, world_px=48), CPU)


@pytest.mark.gpu
@pytest.mark.alone
def test_on_a_gpu_the_same_scenes_without_waiting(
    settings: ClipSettings, waits_for_nobody: Callable[[], AbstractContextManager[None]]
) -> None:
    gpu = torch.device("cuda")
    larger = replace(settings, batch=8)
    here, there = Clips(larger, CPU, seed=1), Clips(larger, gpu, seed=1)
    for frame, other in zip(here.clip(5, 3), there.clip(5, 3), strict=True):
        torch.testing.assert_close(other.clean.cpu(), frame.clean, atol=2e-3, rtol=0)
        assert (other.known.cpu() - frame.known).abs().mean() < 1e-3
    with waits_for_nobody():
        list(there.clip(6, 2))
    torch.cuda.synchronize()
    began_s = time.perf_counter()
    for step in range(20):
        list(there.clip(step, 4))
    torch.cuda.synchronize()
    assert 20 * 4 * 8 / (time.perf_counter() - began_s) > 1000


def test_what_a_seed_draws_never_changes() -> None:
    """A training that is resumed, or repeated by somebody else, must see the same clips."""
    settings = ClipSettings("x", frame_px=24, world_px=48, cuts=0.5, objects=0.6, still=0.3, quality=30)
    generator = torch.Generator().manual_seed(5)
    scene = Scene.draw(settings, torch.zeros(2, 6, 3, 48, 48), 9, generator)
    tables: dict[str, object] = {"cut_B": scene.cut_B}
    for drawn in (scene.camera, scene.moving_object, Degradation.draw(settings, 6, generator)):
        tables |= vars(drawn)
    rows = [f"{name} " + " ".join(f"{x:.3f}" for x in torch.as_tensor(t).flatten()) for name, t in tables.items()]
    check_golden("clips.txt", "\n".join(rows) + "\n")

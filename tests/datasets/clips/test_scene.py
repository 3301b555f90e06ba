"""Motion is known to the pixel: a frame moved by it is the next frame, and where it is not known, it is not claimed."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from redline.datasets.clips import ClipSettings, warp, warp_error
from redline.datasets.clips.scene import Scene
from redline.datasets.clips.warp import positions

SETTINGS = ClipSettings("x", frame_px=48, world_px=96, batch=3, pan_px=3.0, objects=1.0, cuts=0.0, still=0.0)


def smooth_photos(clips: int, side: int) -> Tensor:
    """Waves that are long beside a pixel, so that interpolating between them loses next to nothing."""
    places = positions(side, side, torch.device("cpu"))
    rates, phases = torch.rand(2, clips, 3, 2) * 0.12 + 0.04, torch.rand(2, clips, 3, 1, 1) * 6
    return 0.5 + 0.4 * torch.sin(torch.einsum("nbck,hwk->nbchw", rates, places) + phases)


def scene(settings: ClipSettings = SETTINGS, frames: int = 8, seed: int = 0, photos: Tensor | None = None) -> Scene:
    given = smooth_photos(settings.batch, settings.world_px) if photos is None else photos
    return Scene.draw(settings, given, frames, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(
    "motion",
    [
        {},
        {"objects": 0.0, "zoom": 0.0, "turn": 0.0},
        {"pan_px": 0.0, "turn": 0.0, "zoom": 0.5},
        {"pan_px": 0.0, "zoom": 0.0, "turn": 1.0},
    ],
    ids=["all", "pan", "zoom", "turn"],
)
def test_a_frame_moved_is_the_next_one(motion: dict[str, float], seed: int) -> None:
    settings = replace(SETTINGS, **motion)
    clip, moved = scene(settings, seed=seed), 0
    for frame in range(1, 8):
        before, now = clip.image(frame - 1), clip.image(frame)
        came_from, known = clip.motion(frame)
        error = (now - warp(before, came_from)).abs().amax(1) * known
        assert error.max() < 0.02, (frame, error.max())
        assert 0.5 < known.mean() < 1
        # With no motion, or another one than there was, it is seen, unless it moved less than interpolating loses.
        stood = (now - before).abs().mean()
        if stood < 0.005:
            continue
        moved += 1
        assert warp_error(now, before, came_from, known) < 0.2 * stood
        wrong = positions(48, 48, torch.device("cpu")) * 2 - came_from
        assert warp_error(now, before, wrong, known) > 5 * warp_error(now, before, came_from, known)
    assert moved


def test_the_moving_object_hides_and_uncovers_pixels() -> None:
    """A camera that stands before a flat photo: all that moves is what passes, and its rim alone is not known."""
    settings = replace(SETTINGS, still=1.0, pan_px=4.0)
    photos = torch.stack((torch.zeros(3, 3, 96, 96), smooth_photos(3, 96)[0]))
    clip = scene(settings, photos=photos)
    seen = 0
    for frame in range(1, 8):
        before, now = clip.image(frame - 1), clip.image(frame)
        came_from, known = clip.motion(frame)
        assert ((now - warp(before, came_from)).abs().amax(1) * known).max() < 0.02
        covered, was_covered = now.amax(1) > 0.02, before.amax(1) > 0.02
        uncovered = was_covered & ~covered
        seen += int(uncovered.sum())
        # Places that were covered come from where it was, which is not where they were: they are not claimed.
        assert known[uncovered].sum() == 0 or (came_from - positions(48, 48, now.device))[uncovered].abs().sum() == 0
    assert seen > 20


def test_a_camera_that_stands_gives_the_same_frame() -> None:
    clip = scene(replace(SETTINGS, still=1.0, objects=0.0))
    assert torch.equal(clip.image(0), clip.image(7))
    came_from, known = clip.motion(7)
    torch.testing.assert_close(came_from, positions(48, 48, came_from.device).expand(3, -1, -1, -1), atol=1e-4, rtol=0)
    assert known.mean() > 0.9


def test_after_a_cut_it_is_another_photo_and_no_motion_is_known() -> None:
    clip = scene(replace(SETTINGS, cuts=1.0), frames=6)
    for index, cut in enumerate(clip.cut_B.tolist()):
        assert 1 <= cut < 6
        for frame in range(1, 6):
            known = clip.motion(frame)[1][index]
            assert (known.sum() == 0) == (frame == cut)
        change = [(clip.image(frame)[index] - clip.image(frame - 1)[index]).abs().mean() for frame in range(1, 6)]
        assert max(range(5), key=lambda frame: change[frame]) == cut - 1
    assert clip.motion(0)[1].sum() == 0


def test_the_camera_comes_and_goes_without_end() -> None:
    clip = scene(replace(SETTINGS, pan_px=5.0), frames=1500)
    assert clip.camera.centre_BT2.abs().max() < 96
    speed = (clip.camera.centre_BT2[:, 1:] - clip.camera.centre_BT2[:, :-1]).abs()
    # No faster than asked for, at the photo's scale and with a shaking hand on top.
    assert 1 < speed.max() < 5 * 2 + 2
    assert (clip.moving_object.center_BT2.abs() < 24 + 48 * 0.2 + 3).all()
    there = clip.camera.to_photo(700, positions(48, 48, torch.device("cpu")).expand(3, -1, -1, -1))
    back = clip.camera.from_photo(700, there)
    torch.testing.assert_close(back, positions(48, 48, back.device).expand_as(back), atol=1e-3, rtol=0)


def test_photos_are_averaged_not_skipped() -> None:
    """Fine stripes seen from afar become grey, and do not fold back into broad ones."""
    stripes = (torch.arange(96) % 2).float().expand(2, 3, 3, 96, 96)
    clip = scene(replace(SETTINGS, objects=0.0, zoom=0.0), photos=stripes)
    object.__setattr__(clip.camera, "scale_BT", torch.full_like(clip.camera.scale_BT, 2.0))
    # Waves of two pixels at a scale of two fall on one frame pixel each.
    assert clip.image(3)[..., 8:-8, 8:-8].sub(0.5).abs().mean() < 0.2

"""A poor camera does what it says: blocks as JPEG's, noise of the right size, light that can be given back."""

import io
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from redline.datasets.clips import ClipSettings, Degradation
from redline.datasets.clips.jpeg_artifacts import JpegArtifacts
from synthetic_photos import synthetic_photo

BLOCKING = JpegArtifacts(torch.device("cpu"))


def picture(height: int = 61, width: int = 75, seed: int = 3) -> Tensor:
    return synthetic_photo(height, width, seed)[None].float() / 255


def nothing(clips: int = 1) -> Degradation:
    zero = torch.zeros(clips)
    return Degradation(zero, torch.ones(clips, 3), zero, zero, torch.full((clips,), 101.0))


def psnr_db(one: Tensor, other: Tensor) -> float:
    return float(-10 * (one - other).square().mean().log10())


@pytest.mark.parametrize("quality", [10, 35, 50, 75, 95])
@pytest.mark.parametrize(("half_colour", "least_db"), [(False, 40.0), (True, 33.0)])
def test_blocks_are_those_of_a_jpeg_file(quality: int, half_colour: bool, least_db: float) -> None:
    given = picture()
    file = io.BytesIO()
    pixels = (given[0] * 255).round().byte().permute(1, 2, 0).numpy()
    Image.fromarray(pixels).save(file, "JPEG", quality=quality, subsampling=2 if half_colour else 0)
    expected = torch.from_numpy(np.array(Image.open(file))).permute(2, 0, 1)[None].float() / 255
    seen = BLOCKING(given, torch.tensor([quality]), half_colour)
    assert seen.shape == given.shape and psnr_db(seen, expected) > least_db
    assert psnr_db(seen, expected) > psnr_db(seen, given) + 1
    assert psnr_db(seen, given) == pytest.approx(psnr_db(expected, given), abs=0.6)


def test_each_picture_has_its_own_quality() -> None:
    given = picture().repeat(3, 1, 1, 1)
    seen = BLOCKING(given, torch.tensor([5, 40, 90]))
    scores = [psnr_db(one, given[0]) for one in seen]
    assert scores == sorted(scores) and scores[2] > scores[0] + 5
    assert torch.equal(seen[1:2], BLOCKING(given[:1], torch.tensor([40])))


def test_no_degradation_leaves_the_clip_unchanged() -> None:
    given = picture()
    assert torch.equal(nothing().apply(given, torch.randn_like(given), BLOCKING), given)


def test_light_and_colour_are_lost_and_can_be_kept_on_purpose() -> None:
    given = picture(seed=5) * 0.8
    light = torch.tensor([[0.5, 0.4, 0.3]])
    dark = replace(nothing(), light_BC=light)
    seen = dark.apply(given, torch.zeros_like(given), BLOCKING)
    torch.testing.assert_close(seen, given * light[:, :, None, None], atol=1 / 500, rtol=0)
    torch.testing.assert_close(dark.target(given, torch.zeros(1, 2)), given)
    torch.testing.assert_close(dark.target(given, torch.ones(1, 2)), given * light[:, :, None, None])
    kept_dark = dark.target(given, torch.tensor([[1.0, 0.0]]))
    torch.testing.assert_close(kept_dark, given * 0.4)
    kept_cast = dark.target(given * 0.5, torch.tensor([[0.0, 1.0]]))
    torch.testing.assert_close(kept_cast, given * 0.5 * light[:, :, None, None] / 0.4)


def test_noise_has_the_configured_standard_deviation() -> None:
    given = torch.full((1, 3, 64, 64), 0.5)
    for noise, expected in (
        ({"read_B": 0.05}, 0.05),
        ({"shot_B": 0.1}, 0.1 * 0.5**0.5),
        ({"read_B": 0.05, "shot_B": 0.1}, (0.05**2 + 0.1**2 * 0.5) ** 0.5),
    ):
        noisy = replace(nothing(), **{name: torch.tensor([value]) for name, value in noise.items()})
        seen = noisy.apply(given, torch.randn_like(given), BLOCKING)
        assert float((seen - given).std()) == pytest.approx(expected, rel=0.05)


def test_blur_is_a_gaussian_that_keeps_the_light() -> None:
    given = torch.zeros(1, 3, 21, 21)
    given[..., 10, 10] = 1
    seen = replace(nothing(), blur_B=torch.tensor([1.0])).apply(given, torch.zeros_like(given), BLOCKING)
    assert float(seen.sum()) == pytest.approx(3, rel=0.03)
    assert float(seen[0, 0, 10, 11] / seen[0, 0, 10, 10]) == pytest.approx(np.exp(-0.5), rel=0.05)
    flat = torch.full((1, 3, 12, 9), 128 / 255)
    assert torch.equal(replace(nothing(), blur_B=torch.tensor([2.0])).apply(flat, flat * 0, BLOCKING), flat)


def test_what_is_drawn_stays_within_what_was_asked() -> None:
    settings = ClipSettings("x", noise=0.07, blur_px=0.9, dark=0.5, cast=0.1, quality=30)
    drawn = Degradation.draw(settings, 500, torch.Generator().manual_seed(0))
    assert 0 < drawn.blur_B.max() <= 0.9 and (drawn.blur_B == 0).any()
    gain = 0.5**-0.95
    assert 0.07 < drawn.read_B.max() <= 0.07 * gain and 0.07 < drawn.shot_B.max() <= 0.07 * gain**0.5
    assert drawn.light_BC.min() >= 0.5**0.4 * 0.9 - 1e-6 and drawn.light_BC.max() <= 1.1 + 1e-6
    assert drawn.light_BC.min() < 0.75 and drawn.light_BC.max() > 1.05
    touched = drawn.quality_B[drawn.quality_B <= 100]
    assert 300 < len(touched) < 400 and touched.min() >= 30 and touched.min() < 33


def test_a_camera_makes_up_for_darkness_with_noise() -> None:
    settings = ClipSettings("x", noise=0.1, dark=0.5, cast=0.0)
    dark = Degradation.draw(settings, 2000, torch.Generator().manual_seed(0))
    lit = Degradation.draw(replace(settings, dark=0.0), 2000, torch.Generator().manual_seed(0))
    gain = dark.read_B / lit.read_B
    told = lit.read_B > 0
    # What is left to see is at least the light there was to the power of 0.4, at a gain of its power of -0.6.
    assert (dark.light_BC[told, 0] >= gain[told] ** (-0.4 / 0.6) - 1e-5).all() and gain[told].max() > 1.6
    assert torch.allclose(dark.shot_B[told], lit.shot_B[told] * gain[told].sqrt())
    assert (lit.light_BC == 1).all() and (gain[told & (dark.light_BC[:, 0] == 1)] == 1).all()

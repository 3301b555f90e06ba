"""How far off an output is, and history that has gone wrong."""

import pytest
import torch

from redline.training.lsd.loss import corrupted, difference, soft_abs, weights_by_input


def test_small_differences_count_by_their_square_and_large_ones_by_their_size() -> None:
    found = soft_abs(torch.tensor([0.0, 0.003, -0.003, 1.0, -1.0], dtype=torch.float64)).tolist()
    assert found[0] == 0 and found[1] == found[2] == pytest.approx(0.003**2 / 0.06, rel=0.01)
    assert found[3] == found[4] == pytest.approx(1 - 0.03, rel=0.001)


def test_each_clip_counts_by_how_bad_its_input_is() -> None:
    seen, target = torch.zeros(2, 3, 4, 4), torch.zeros(2, 3, 4, 4)
    seen[1] += 0.5
    weights = weights_by_input(seen, target)
    assert weights.tolist() == pytest.approx([1 / 0.03, 1 / (0.5009 - 0.03 + 0.03)], rel=1e-3)
    alike = difference(seen, target, torch.tensor([1.0, 1.0]))
    assert alike == pytest.approx(float(soft_abs(torch.tensor(0.5))) / 2)
    assert difference(seen, target, torch.tensor([9.0, 2.0])) == pytest.approx(2 * float(alike))


def picture() -> torch.Tensor:
    across = torch.linspace(-0.8, 0.8, 24)
    return across.expand(200, 3, 24, 24).clone()


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_a_share_of_the_images_is_corrupted(share: float) -> None:
    given = picture()
    found = corrupted(given, share, torch.Generator().manual_seed(0))
    changed = (found != given).flatten(1).any(1).float().mean()
    assert changed == pytest.approx(share, abs=0.1 if 0 < share < 1 else 0)
    assert found.abs().max() <= 1


@pytest.mark.parametrize(("level", "least", "most"), [(0.0, 0.07, 0.085), (0.5, 0.11, 0.145), (-0.5, 0.11, 0.145)])
def test_colours_are_a_little_off_and_not_more(level: float, least: float, most: float) -> None:
    """By an offset of 0.08 and a gain of 12%, in both directions, each colour in its own way."""
    given = torch.full((200, 3, 24, 24), level)
    off = corrupted(given, 1.0, torch.Generator().manual_seed(1)) - given
    shifts = off.mean((2, 3))
    assert least < shifts.max() < most and -most < shifts.min() < -least
    assert (shifts[:, 0] - shifts[:, 1]).abs().max() > least
    noise = off.std((2, 3))
    assert 0.1 < noise.max() < 0.14 and noise.min() < 0.01


def test_a_corrupted_image_is_moved_by_at_most_two_pixels() -> None:
    """Where the picture rises by one step a pixel, a move is a shift of the middle."""
    given = picture()
    step = float(given[0, 0, 0, 1] - given[0, 0, 0, 0])
    found = corrupted(given, 1.0, torch.Generator().manual_seed(2))
    middle = (found[..., 8:-8] - given[..., 8:-8]).mean((1, 2, 3)) / step
    assert 1.0 < middle.abs().max() < 2.0 + 0.12 / step and middle.min() < -0.5 and middle.max() > 0.5

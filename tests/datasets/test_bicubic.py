"""The bicubic agrees with a loop written from its definition, and has the properties that make it one."""

import math

import numpy as np
import pytest
import torch

from redline.datasets.bicubic import contributions, resize, resize_to, to_8_bits
from redline.errors import RedlineError


def keys_cubic(x: float) -> float:
    x = abs(x)
    if x <= 1:
        return 1.5 * x**3 - 2.5 * x**2 + 1
    return -0.5 * x**3 + 2.5 * x**2 - 4 * x + 2 if x < 2 else 0.0


def mirror(index: int, length: int) -> int:
    """Counted from 1, the outermost pixel repeated: … 2 1 | 1 2 3 … n | n n−1 …"""
    while not 1 <= index <= length:
        index = 1 - index if index < 1 else 2 * length + 1 - index
    return index


def by_definition(line: np.ndarray, new_length: int, scale: float) -> np.ndarray:
    """One line, pixel by pixel, in Matlab's own coordinates."""
    stretch = min(scale, 1.0)
    result = np.zeros(new_length)
    for x in range(1, new_length + 1):
        centre = x / scale + 0.5 * (1 - 1 / scale)
        reach = range(math.floor(centre - 2 / stretch) - 1, math.ceil(centre + 2 / stretch) + 2)
        weights = {k: stretch * keys_cubic(stretch * (centre - k)) for k in reach}
        total = sum(weights.values())
        result[x - 1] = sum(w * line[mirror(k, len(line)) - 1] for k, w in weights.items()) / total
    return result


def both_sides(picture: np.ndarray, height: int, width: int, scales: tuple[float, float]) -> np.ndarray:
    rows = np.stack([by_definition(column, height, scales[0]) for column in picture.T], axis=1)
    return np.stack([by_definition(row, width, scales[1]) for row in rows])


@pytest.mark.parametrize("scale", [1 / 4, 1 / 2, 1 / 3, 0.7, 1.0, 1.3, 2, 3, 4])
def test_agrees_with_the_definition(scale: float) -> None:
    picture = torch.rand(13, 18, dtype=torch.float64)
    seen = resize(picture, scale)
    expected = both_sides(picture.numpy(), math.ceil(13 * scale), math.ceil(18 * scale), (scale, scale))
    assert seen.dtype == torch.float64
    np.testing.assert_allclose(seen.numpy(), expected, atol=1e-12, rtol=0)
    np.testing.assert_allclose(resize(picture.float(), scale).numpy(), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("size", [(5, 29), (1, 1), (40, 3)])
def test_any_size_by_a_factor_of_each_side(size: tuple[int, int]) -> None:
    picture = torch.rand(11, 7, dtype=torch.float64)
    expected = both_sides(picture.numpy(), *size, (size[0] / 11, size[1] / 7))
    np.testing.assert_allclose(resize_to(picture, *size).numpy(), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("shape", [(1, 1), (1, 23), (2, 3)])
def test_pictures_smaller_than_the_kernel_are_mirrored_as_often_as_needed(shape: tuple[int, int]) -> None:
    picture = torch.rand(shape, dtype=torch.float64)
    expected = both_sides(picture.numpy(), math.ceil(shape[0] / 4), math.ceil(shape[1] / 4), (0.25, 0.25))
    np.testing.assert_allclose(resize(picture, 0.25).numpy(), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("scale", [1 / 4, 1 / 3, 0.37, 2.5, 4])
def test_weights_sum_to_one_and_a_flat_picture_stays_flat(scale: float) -> None:
    positions, weights = contributions(31, math.ceil(31 * scale), scale)
    torch.testing.assert_close(weights.sum(1), torch.ones(len(weights), dtype=torch.float64), atol=1e-12, rtol=0)
    assert positions.min() >= 0 and positions.max() < 31
    flat = torch.full((3, 31, 20), 0.731)
    torch.testing.assert_close(resize(flat, scale), torch.full_like(resize(flat, scale), 0.731), atol=1e-6, rtol=0)


def test_batches_and_channels_are_resized_one_by_one() -> None:
    batch = torch.rand(2, 3, 12, 9)
    whole = resize(batch, 0.5)
    assert whole.shape == (2, 3, 6, 5)
    torch.testing.assert_close(whole[1, 2], resize(batch[1, 2], 0.5))


@pytest.mark.parametrize("scale", [1 / 4, 1 / 2])
def test_bytes_are_rounded_after_each_side(scale: float) -> None:
    picture = torch.randint(0, 256, (3, 37, 50), dtype=torch.uint8)
    height, width = math.ceil(37 * scale), math.ceil(50 * scale)

    def bytes_of(line: np.ndarray, length: int) -> np.ndarray:
        return np.floor(by_definition(line, length, scale) + 0.5).clip(0, 255)

    rows = [np.stack([bytes_of(column, height) for column in plane.T], axis=1) for plane in picture.double().numpy()]
    expected = np.stack([[bytes_of(row, width) for row in plane] for plane in rows])
    seen = resize(picture, scale)
    assert seen.dtype == torch.uint8
    assert torch.equal(seen, torch.from_numpy(expected.astype(np.uint8)))


def test_halves_round_up_and_nothing_leaves_the_range() -> None:
    values = torch.tensor([-3.0, 0.49, 0.5, 1.5, 2.5, 254.5, 300.0])
    assert to_8_bits(values).tolist() == [0, 0, 1, 2, 3, 255, 255]


@pytest.mark.parametrize("scale", [0, -1, math.inf, math.nan])
def test_impossible_factors_are_refused(scale: float) -> None:
    with pytest.raises(RedlineError, match="scale must be"):
        resize(torch.rand(4, 4), scale)


def test_inputs_other_than_images_raise() -> None:
    with pytest.raises(RedlineError, match="floats and bytes"):
        resize(torch.ones(4, 4, dtype=torch.int32), 2)
    with pytest.raises(RedlineError, match="shape"):
        resize(torch.ones(3, 0, 4), 2)
    with pytest.raises(RedlineError, match="0 × 3"):
        resize_to(torch.ones(3, 4), 0, 3)

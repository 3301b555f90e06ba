"""The size of a frame in square pixels, and what its pixels must be."""

from fractions import Fraction

import pytest
import torch
from torch import Tensor

from redline.errors import RedlineError
from redline.stream.frames import Frame, check_pixels, square_size


@pytest.mark.parametrize(
    ("aspect", "size"),
    [
        (Fraction(1), (100, 200)),
        (Fraction(4, 3), (100, 267)),
        (Fraction(1, 2), (200, 200)),
        (Fraction(8), (100, 1600)),
        (Fraction(1, 8), (800, 200)),
        (Fraction(9), (100, 200)),
        (Fraction(1, 9), (100, 200)),
    ],
)
def test_one_side_grows_to_make_pixels_square(aspect: Fraction, size: tuple[int, int]) -> None:
    assert square_size(100, 200, aspect) == size


def test_a_frame_knows_its_size_and_time() -> None:
    frame = Frame(torch.zeros(4, 6, 3, dtype=torch.uint8), 0, 5, Fraction(1, 25), 0.0)
    assert (frame.height, frame.width, frame.time_s) == (4, 6, Fraction(1, 5))
    assert check_pixels(frame.pixels, "it") is frame.pixels


@pytest.mark.parametrize(
    "wrong",
    [
        torch.zeros(4, 6, 3),
        torch.zeros(4, 6, dtype=torch.uint8),
        torch.zeros(4, 6, 4, dtype=torch.uint8),
        torch.zeros(0, 6, 3, dtype=torch.uint8),
        torch.zeros(4, 6, 3, dtype=torch.uint8, device="meta"),
        [1],
    ],
    ids=["floats", "no colour", "alpha", "empty", "elsewhere", "a list"],
)
def test_other_pixels_are_refused(wrong: Tensor) -> None:
    with pytest.raises(RedlineError, match=r"it returned .*, not uint8 pixels \(H, W, 3\) on the CPU"):
        check_pixels(wrong, "it")

"""Sizes as people read them."""

import pytest

from redline.quantities import format_megapixels


@pytest.mark.parametrize(
    ("pixels", "said"),
    [
        (2304, "0.0023 megapixels"),
        (4 * 10**5, "0.4 megapixels"),
        (143_900_000, "144 megapixels"),
        (2_240_000_000, "2,240"),
    ],
)
def test_megapixels_of_few_and_of_many(pixels: int, said: str) -> None:
    assert format_megapixels(pixels).startswith(said)

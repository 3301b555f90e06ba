"""The colours of a decoded frame, and what is guessed where it names none."""

from types import SimpleNamespace
from typing import Any

import pytest

from redline.errors import RedlineError
from redline.upscale.video.pixels import BT601, BT709, FULL_RANGE, RGB, UNSPECIFIED, Colour, colour_of


def frame(
    matrix: int = BT709,
    *,
    size: tuple[int, int] = (640, 480),
    color_range: int = 1,
    name: str = "yuv420p",
    components: int = 3,
    is_rgb: bool = False,
    has_palette: bool = False,
) -> Any:
    form = SimpleNamespace(name=name, components=[0] * components, is_rgb=is_rgb, has_palette=has_palette)
    return SimpleNamespace(
        format=form,
        color_range=color_range,
        color_primaries=4,
        color_trc=5,
        colorspace=matrix,
        width=size[0],
        height=size[1],
    )


@pytest.mark.parametrize(
    ("size", "matrix"), [((1280, 100), BT709), ((100, 720), BT709), ((1279, 719), BT601), ((1920, 1080), BT709)]
)
def test_a_matrix_that_is_not_named_is_guessed_by_the_size(size: tuple[int, int], matrix: int) -> None:
    colour, notes = colour_of(frame(UNSPECIFIED, size=size))
    assert colour.matrix == matrix and len(notes) == 1 and "declares no colour matrix" in notes[0]
    assert colour_of(frame(9))[0] == Colour(9, 4, 5, False) and colour_of(frame(9))[1] == []


@pytest.mark.parametrize(
    ("given", "full"),
    [
        ({"color_range": FULL_RANGE}, True),
        ({"color_range": 1}, False),
        ({"color_range": 0}, False),
        ({"name": "yuvj420p", "color_range": 0}, True),
        ({"components": 1, "color_range": 0}, True),
        ({"components": 1, "color_range": 1}, False),
    ],
)
def test_black_is_16_unless_the_frame_says_otherwise(given: dict[str, Any], full: bool) -> None:
    assert colour_of(frame(**given))[0].full_range is full


def test_rgb_palettes_and_grey_need_no_guess() -> None:
    for given in ({"is_rgb": True}, {"has_palette": True}):
        assert colour_of(frame(UNSPECIFIED, **given)) == (Colour(RGB, 4, 5, True), [])
    for matrix in (UNSPECIFIED, 12):
        assert colour_of(frame(matrix, components=1))[1] == []
    with pytest.raises(RedlineError, match="number 12 of ITU-T H.273"):
        colour_of(frame(12))


def test_rgb_gets_a_matrix_where_it_becomes_yuv() -> None:
    rgb = Colour(RGB, 4, 5, True)
    assert rgb.as_yuv() == Colour(BT709, 4, 5, False) and rgb.as_yuv().as_yuv() == rgb.as_yuv()
    assert Colour(9, 4, 5, False).as_rgb() == Colour(RGB, 4, 5, True)
    tagged = SimpleNamespace()
    Colour(9, 4, 5, True).tag(tagged)
    assert vars(tagged) == {"colorspace": 9, "color_primaries": 4, "color_trc": 5, "color_range": FULL_RANGE}
    Colour(9, 4, 5, False).tag(tagged)
    assert tagged.color_range == 1

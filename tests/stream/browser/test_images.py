"""Image conversions keep colours and the centre at any size."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from av import VideoFrame

from redline.stream.browser.broadcast import MAX_SHOWN_PIXELS, crop_and_scale, shown_size, to_codec_frame

# What halving the colours and 8 bits of YUV cost on smooth pictures.
NEAR = 4


def smooth(height: int, width: int) -> np.ndarray:
    phase = np.random.default_rng().uniform(0, 6, 3)
    rows, columns = np.mgrid[:height, :width][..., None] / max(64, height, width)
    return (127 + 100 * np.sin(3 * rows + 2 * columns + phase)).astype(np.uint8)


@pytest.mark.parametrize(("height", "width"), [(64, 96), (65, 97), (1, 1), (1, 40), (31, 2), (16, 17)])
def test_there_and_back_keeps_the_colours_and_pads_to_even_sides(height: int, width: int) -> None:
    pixels = torch.from_numpy(smooth(height, width))
    picture = to_codec_frame(pixels)
    assert (picture.height, picture.width) == (height + height % 2, width + width % 2)
    assert picture.format.name == "yuv420p"
    back = picture.to_ndarray(format="rgb24")[:height, :width]
    assert np.abs(back.astype(int) - pixels.numpy()).mean() < NEAR


@pytest.mark.parametrize(("height", "width"), [(2160, 3840), (1081, 1921), (40, 60_000), (4321, 7681)])
def test_what_is_too_large_to_encode_live_is_shown_smaller(height: int, width: int) -> None:
    shown_height, shown_width = shown_size(height, width)
    assert shown_height * shown_width <= MAX_SHOWN_PIXELS and not shown_height % 2 and not shown_width % 2
    assert math.isclose(shown_width / shown_height, width / height, rel_tol=0.05)


@pytest.mark.parametrize(
    ("size", "aspect", "shown"),
    [
        ((576, 720), Fraction(64, 45), (576, 1024)),
        ((480, 720), Fraction(8, 9), (540, 720)),
        ((35, 51), Fraction(3, 2), (36, 76)),
        ((1080, 1440), Fraction(4, 3), (1080, 1920)),
        ((1080, 1920), Fraction(2), (762, 2714)),
        ((40, 60), Fraction(1, 1000), (40, 60)),
    ],
)
def test_pixels_are_shown_as_wide_as_they_are(size: tuple[int, int], aspect: Fraction, shown: tuple[int, int]) -> None:
    pixels = torch.from_numpy(smooth(*size))
    picture = to_codec_frame(pixels, aspect)
    assert (picture.height, picture.width) == shown == shown_size(*size, aspect)
    back = picture.to_ndarray(format="rgb24").astype(int)
    rows, columns = (np.arange(new) * old // new for new, old in zip(shown, size, strict=True))
    assert np.abs(back - pixels.numpy()[rows][:, columns]).mean() < NEAR


def test_a_large_frame_is_scaled_and_not_cut() -> None:
    pixels = torch.zeros(1400, 2000, 3, dtype=torch.uint8)
    pixels[:, 1000:] = 255
    picture = to_codec_frame(pixels).to_ndarray(format="rgb24")
    assert picture.shape[:2] == shown_size(1400, 2000)
    assert abs(float(picture.mean()) - 127.5) < 2


@pytest.mark.parametrize(("height", "width"), [(48, 48), (47, 33), (96, 20), (17, 90), (16, 16)])
@pytest.mark.parametrize("sent", [(48, 64), (90, 50), (30, 30), (2, 2), (200, 16)])
def test_what_is_sent_covers_what_is_wanted_from_its_middle(height: int, width: int, sent: tuple[int, int]) -> None:
    picture = to_codec_frame(torch.from_numpy(smooth(*sent)))
    pixels = crop_and_scale(picture, height, width)
    assert pixels.shape == (height, width, 3) and pixels.dtype == torch.uint8 and pixels.is_contiguous()
    whole = picture.to_ndarray(format="rgb24").astype(float)
    middle = whole[sent[0] // 2 - 1 : sent[0] // 2 + 1, sent[1] // 2 - 1 : sent[1] // 2 + 1].mean((0, 1))
    got = pixels[height // 2 - 1 : height // 2 + 1, width // 2 - 1 : width // 2 + 1].double().mean((0, 1)).numpy()
    assert np.abs(middle - got).max() < 12


@pytest.mark.parametrize("sent", [(2, 9000), (9000, 2), (1, 1), (1, 16_000)])
def test_a_frame_of_any_shape_takes_no_more_memory_than_the_wanted_one(sent: tuple[int, int]) -> None:
    picture = VideoFrame.from_ndarray(np.full((*sent, 3), 200, np.uint8), format="rgb24")
    pixels = crop_and_scale(picture, 1024, 1024)
    assert pixels.shape == (1024, 1024, 3) and int(pixels.min()) == int(pixels.max()) == 200


def test_a_frame_of_the_wanted_size_is_not_scaled() -> None:
    rgb = np.random.default_rng().integers(0, 256, (34, 48, 3), dtype=np.uint8)
    picture = VideoFrame.from_ndarray(rgb, format="rgb24")
    assert torch.equal(crop_and_scale(picture, 34, 48), torch.from_numpy(rgb))

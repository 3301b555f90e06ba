"""YUV and RGB by the standards' formulas: exact there and back, and as a player's converter has it."""

from itertools import product

import av
import numpy as np
import pytest
import torch
from av.video.format import VideoFormat
from av.video.frame import VideoFrame

from redline.errors import RedlineError
from redline.upscale.video.pixels import Colour, colour_of, to_frame, to_planes, to_rgb
from upscale.video.clips import shown_by_swscale

BT709, BT601, BT2020 = 1, 6, 9
# From the standards' texts, not from the code under test: Y = r·R + g·G + b·B.
LUMA = {BT709: (0.2126, 0.7152, 0.0722), BT601: (0.299, 0.587, 0.114), BT2020: (0.2627, 0.6780, 0.0593)}


def chart(seed: int = 0) -> torch.Tensor:
    """Blocks of 16×16 pixels: the corners of the colour cube, and random colours, (3, 64, 96)."""
    blocks = torch.rand(3, 4, 6, generator=torch.Generator().manual_seed(seed))
    blocks[:, 0, :4] = torch.tensor([[0.0, 0, 1, 1], [0, 1, 0, 1], [0, 1, 1, 1]])
    blocks[:, 1, :3] = torch.eye(3)
    return blocks.repeat_interleave(16, 1).repeat_interleave(16, 2)


def inside(frame: torch.Tensor) -> torch.Tensor:
    """The middle of every block, where neighbours' chroma does not reach."""
    return frame.unflatten(-2, (4, -1)).unflatten(-1, (6, -1))[..., 5:11, :, 5:11]


def colour(matrix: int = BT709, full: bool = False) -> Colour:
    return Colour(matrix, 1, 1, full)


def round_trip(rgb: torch.Tensor, layout: str, how: Colour) -> tuple[VideoFrame, torch.Tensor]:
    height, width = rgb.shape[1:]
    form = VideoFormat(layout, width, height)
    packed = torch.cat([plane.reshape(-1) for plane in to_planes(rgb, form, how)])
    frame = to_frame(packed, form, width, height, how)
    return frame, to_rgb(frame, how)


@pytest.mark.parametrize(("matrix", "full", "bits"), [*product(LUMA, (False, True), (8, 10, 12))])
def test_planes_are_what_the_standard_says(matrix: int, full: bool, bits: int) -> None:
    red, green, blue = chart().double()
    shares = LUMA[matrix]
    luma = shares[0] * red + shares[1] * green + shares[2] * blue
    chroma = (blue - luma) / (2 - 2 * shares[2]), (red - luma) / (2 - 2 * shares[0])
    if full:
        top, middle = 2**bits - 1, 2 ** (bits - 1)
        expected = [luma * top, *(part * top + middle for part in chroma)]
    else:
        expected = [(16 + 219 * luma) * 2 ** (bits - 8), *((128 + 224 * part) * 2 ** (bits - 8) for part in chroma)]
    layout = VideoFormat("yuv444p" if bits == 8 else f"yuv444p{bits}le", 96, 64)
    for plane, wanted in zip(to_planes(chart(), layout, colour(matrix, full)), expected, strict=True):
        assert float((plane.double() - wanted.clamp(0, 2**bits - 1)).abs().max()) <= 0.5 + 1e-3


@pytest.mark.parametrize(
    ("layout", "tolerance"),
    [("yuv444p", 1.6), ("yuv422p", 1.6), ("yuv420p", 1.6), ("yuv420p10le", 0.4), ("yuv444p12le", 0.1), ("bgr0", 0.51)],
)
@pytest.mark.parametrize(("matrix", "full"), [*product((BT709, BT601), (False, True))])
def test_there_and_back(layout: str, tolerance: float, matrix: int, full: bool) -> None:
    rgb = chart(1)
    frame, again = round_trip(rgb, layout, colour(matrix, full))
    assert float((inside(again) - inside(rgb)).abs().max()) * 255 < tolerance
    tagged = colour_of(frame)[0]
    assert frame.format.is_rgb or tagged == colour(matrix, full)


@pytest.mark.parametrize(("layout", "matrix", "full"), [*product(("yuv420p", "yuv422p10le"), LUMA, (False, True))])
def test_a_players_converter_sees_the_same_colours(layout: str, matrix: int, full: bool) -> None:
    frame, ours = round_trip(chart(2), layout, colour(matrix, full))
    theirs = shown_by_swscale(frame).permute(2, 0, 1)
    assert float((inside(theirs) - inside(ours)).abs().max()) * 255 < 2.6
    wrong = colour(BT601 if matrix != BT601 else BT709, full)
    assert float((inside(theirs) - inside(to_rgb(frame, wrong))).abs().max()) * 255 > 10


def test_a_wrong_range_is_seen() -> None:
    frame, ours = round_trip(chart(), "yuv444p", colour(full=False))
    assert float((to_rgb(frame, colour(full=True)) - ours).abs().max()) * 255 > 10


@pytest.mark.parametrize("size", [(2, 2), (6, 2), (2, 10), (14, 6)])
def test_chroma_lies_on_even_columns_and_between_rows(size: tuple[int, int]) -> None:
    """A slope that is linear in both directions stays itself, but at the edges, where it is continued flat."""
    width, height = size
    slope = torch.linspace(0.2, 0.8, width)[None, :] + torch.linspace(-0.1, 0.1, height)[:, None]
    rgb = torch.stack([slope, slope.flip(1), slope.flip(0)])
    _, again = round_trip(rgb, "yuv420p10le", colour())
    inner = (slice(None), slice(2, -2), slice(2, -2))
    assert again.shape == rgb.shape
    if min(size) > 4:
        assert float((again[inner] - rgb[inner]).abs().max()) < 0.004


@pytest.mark.parametrize(
    "layout",
    ["nv12", "p010le", "yuyv422", "yuva420p", "rgb24", "bgr0", "rgba", "gbrp10le", "rgb48le", "yuv411p", "yuv440p"],
)
def test_other_formats_are_read_too(layout: str) -> None:
    rgb = chart(3)
    _, ours = round_trip(rgb, "yuv444p12le", colour())
    bytes_ = (rgb * 255).round().to(torch.uint8).permute(1, 2, 0).contiguous().numpy()
    packed = av.VideoFrame.from_ndarray(bytes_, format="rgb24")
    full = 2 if VideoFormat(layout).is_rgb else 1
    frame = packed.reformat(format=layout, dst_colorspace=1, src_color_range=2, dst_color_range=full)
    frame.colorspace = 1
    how = colour_of(frame)[0]
    # A quarter of the columns: swscale's filter reaches into the middle of a block.
    tolerance = 8 if layout == "yuv411p" else 3.1
    assert float((inside(to_rgb(frame, how)) - inside(ours)).abs().max()) * 255 < tolerance


@pytest.mark.parametrize("layout", ["gray", "gray10le"])
def test_grey(layout: str) -> None:
    frame = av.VideoFrame(33, 17, layout)
    dtype = np.uint8 if layout == "gray" else np.uint16
    values = np.arange(33, dtype=dtype)[None].repeat(17, 0) * (7 if layout == "gray" else 31)
    for plane in frame.planes:
        np.frombuffer(plane, dtype).reshape(17, -1)[:, :33] = values
    frame = to_rgb(frame, colour_of(frame)[0])
    assert frame.shape == (3, 17, 33)
    assert torch.allclose(frame[1], torch.from_numpy(values / (255 if layout == "gray" else 1023)).float(), atol=1e-6)


def test_an_unnamed_matrix_is_guessed_from_the_size_and_said() -> None:
    for size, guess in (((48, 32), BT601), ((1280, 720), BT709)):
        found, notes = colour_of(av.VideoFrame(*size, "yuv420p"))
        assert found.matrix == guess and not found.full_range and "declares no colour matrix" in notes[0]
    odd = av.VideoFrame(48, 32, "yuv420p")
    odd.colorspace = 14
    with pytest.raises(RedlineError, match="number 14"):
        colour_of(odd)

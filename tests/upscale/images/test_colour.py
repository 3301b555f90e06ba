"""Samples survive the way to planes and back, and transparency leaves no dark fringe."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from redline.upscale.images import colour
from redline.upscale.images.colour import from_planes, to_planes, unpremultiply
from redline.upscale.images.formats import ImageError


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_every_value_comes_back(bits: int, channels: int) -> None:
    values = np.arange(2**bits, dtype=np.uint8 if bits == 8 else np.uint16).reshape(-1, 64, 1)
    rows = np.concatenate([np.roll(values, shift) for shift in range(channels)], axis=2)
    colour, alpha = to_planes(rows)
    assert colour.shape == (3, *rows.shape[:2]) and colour.dtype == torch.float32
    assert colour.min() == 0 and colour.max() == 1
    back = from_planes(colour, alpha, channels, bits).numpy()
    assert back.dtype == rows.dtype and np.array_equal(back, rows)


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [8, 16])
def test_every_value_comes_back_from_the_device(bits: int) -> None:
    rows = np.arange(2**bits, dtype=np.uint8 if bits == 8 else np.uint16).reshape(-1, 64, 1).repeat(4, 2)
    colour, alpha = to_planes(rows, "cuda")
    assert colour.is_cuda and alpha is not None and alpha.is_cuda
    assert np.array_equal(from_planes(colour, alpha, 4, bits).cpu().numpy(), rows)


def test_grey_is_repeated_and_alpha_is_apart() -> None:
    rows = torch.randint(0, 256, (5, 7, 2), dtype=torch.uint8)
    colour, alpha = to_planes(rows)
    assert alpha is not None and torch.equal(alpha[0], rows[..., 1] / 255)
    assert all(torch.equal(plane, rows[..., 0] / 255) for plane in colour)


def test_rounds_to_the_nearest_and_clips() -> None:
    colour = torch.tensor([-0.2, 0.49 / 255, 0.51 / 255, 254.51 / 255, 1.3]).expand(3, 1, 5)
    assert from_planes(colour, None, 3, 8)[0, :, 0].tolist() == [0, 0, 1, 255, 255]
    assert from_planes(colour, None, 1, 16)[0, [0, 4], 0].tolist() == [0, 65535]


def test_planes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ImageError, match="planes without alpha cannot be converted to 4 channels"):
        from_planes(torch.rand(3, 2, 2), None, 4, 8)
    with pytest.raises(ImageError, match="are not an image"):
        to_planes(np.zeros((2, 2, 3), np.float32))


def test_premultiplied_colour_comes_back_wherever_it_is_visible() -> None:
    colour, alpha = torch.rand(3, 31, 17), torch.rand(1, 31, 17)
    alpha[:, ::3] = 0
    back = unpremultiply(colour * alpha, alpha)
    assert back.isfinite().all()
    visible = alpha[0] > 0
    assert torch.allclose(back[:, visible], colour[:, visible], atol=1e-6)
    assert (back[:, ~visible] == 0).all()


def test_no_dark_fringe_where_white_ends_in_transparent_black() -> None:
    colour, alpha = torch.ones(3, 8, 8), torch.ones(1, 8, 8)
    colour[..., 4:], alpha[..., 4:] = 0, 0

    def enlarge(planes: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.interpolate(planes[None], scale_factor=4, mode="bilinear")[0]

    enlarged_alpha = enlarge(alpha)
    visible = enlarged_alpha[0] > 0
    fringed = enlarge(colour)[:, visible]
    clean = unpremultiply(enlarge(colour * alpha), enlarged_alpha)[:, visible]
    assert fringed.min() < 0.5
    assert clean.min() > 0.999


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_strips_give_what_the_whole_gives(channels: int, bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    colour = torch.rand(3, 23, 17) * 1.2 - 0.1
    alpha = torch.rand(1, 23, 17) if channels in (2, 4) else None
    whole = from_planes(colour, alpha, channels, bits)
    monkeypatch.setattr("redline.upscale.images.colour._STRIP_BYTES", 5 * 16 * 17)
    found = from_planes(colour, alpha, channels, bits)
    assert found.shape == (23, 17, channels) and found.dtype == whole.dtype
    assert torch.equal(found.view(torch.uint8), whole.view(torch.uint8))


class LargestClamp(TorchFunctionMode):
    """Notes the largest tensor that `clamp` returns."""

    numel = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if getattr(function, "__name__", "") == "clamp":
            self.numel = max(self.numel, result.numel())
        return result


@pytest.mark.parametrize("rows", [1, 3])
def test_wide_bands_are_converted_in_strips(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    planes = torch.rand(3, 10, 40)
    whole = from_planes(planes, None, 3, 8)
    monkeypatch.setattr(colour, "_STRIP_BYTES", 16 * 40 * rows)
    with LargestClamp() as seen:
        assert torch.equal(from_planes(planes, None, 3, 8), whole)
    assert seen.numel == 3 * rows * 40

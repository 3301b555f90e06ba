"""Random pairs of high- and low-resolution crops of photos, computed on the training device.

All photos and their low-resolution images stay on the device as bytes, concatenated into one list of pixels. Two
gathers, whose indices encode position, flip and rotation, produce a batch. There are no worker processes, no image is
copied from the host, and the device never waits for data.

Large parts of most photos are sky or out of focus, and contribute little to training. The probability of a crop is
therefore proportional to (detail that bicubic downscaling loses in it) ** `focus`; with `focus` = 0 it is uniform.

Areas of one color are then hardly ever sampled, and models trained this way rendered the corner of a white page grey.
A fraction `flat` of the crops therefore has a single color, for example pure white.

Training overfits a few dozen photos quickly. To prevent this, the channels of a fraction `recolour` of the crops are
permuted, scaled and inverted. Bicubic downscaling is linear, so the recolored low-resolution crop still matches, except
for clipped values.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from redline.datasets.bicubic import resize
from redline.datasets.device_copy import copy_to_device
from redline.datasets.photo_pairs import DRAWN_FOLDER, PhotoPairs, PhotoSettings, Variant
from redline.errors import RedlineError

# The distance between candidate positions is the crop's side divided by this. A sampled crop is then moved by a random
# offset smaller than that distance.
_CANDIDATES_PER_CROP = 4
# Added to the lost detail (the mean error on the scale 0…255), so that no position has probability 0.
_LEAST_LOSS = 0.5


@dataclass(frozen=True)
class Draw:
    """The random parameters of a batch: image, position in its low-resolution image, orientation (0…7), and colors."""

    image: Tensor
    top: Tensor
    left: Tensor
    orientation: Tensor
    flat: Tensor
    color: Tensor
    mix: Tensor
    shift: Tensor


class PhotoCrops:
    """Samples crops: `batch(step)` returns low- and high-resolution crops in [0, 1], determined by seed and step."""

    def __init__(self, settings: PhotoSettings, scale: int, device: torch.device, seed: int = 0) -> None:
        self.settings, self.scale, self.device, self.seed = settings, scale, device, seed
        self.pairs = PhotoPairs(settings, scale, device, seed)
        self._round: int | None = None
        if settings.renew_steps:
            self.pairs.decode()
        else:
            self._load(self.pairs)

    def _load(self, variants: Iterable[Variant]) -> None:
        large, small, sizes, candidates, chances, shrinks, are_drawn = [], [], [], [], [], [], []
        for shrink, high, low, drawn in variants:
            starts, chance = _candidates(high, low, self.scale, self.settings)
            candidates.append(F.pad(starts, (1, 0), value=len(sizes)))
            chances.append(chance)
            shrinks.append(torch.full(chance.shape, shrink))
            are_drawn.append(torch.full(chance.shape, drawn))
            sizes.append(low.shape[1:])
            large.append(high.permute(1, 2, 0).reshape(-1, 3))
            small.append(low.permute(1, 2, 0).reshape(-1, 3))
        self._large, self._small = torch.cat(large), torch.cat(small)
        self._sizes = torch.tensor(sizes)
        self._first = F.pad(self._sizes.prod(1).cumsum(0), (1, 0))[:-1]
        self._candidates, chance = torch.cat(candidates), torch.cat(chances)
        _balance(chance, torch.cat(shrinks), torch.cat(are_drawn), self.settings)
        self._chances = chance.cumsum(0)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Returns low-resolution crops (B, 3, crop, crop) and their originals (B, 3, scale·crop, scale·crop)."""
        draw, scale, crop = self.draw(step), self.scale, self.settings.crop_px
        first, width = self._first[draw.image], self._sizes[draw.image, 1]
        start = first + draw.top * width + draw.left
        start_large = (first * scale + draw.top * width * scale + draw.left) * scale
        small = _cut(self._small, start, width, draw.orientation, crop)
        large = _cut(self._large, start_large, width * scale, draw.orientation, crop * scale)
        if self.settings.recolour:
            mix, shift = (copy_to_device(table, small.device) for table in (draw.mix, draw.shift))
            small, large = (_recolored(crops, mix, shift) for crops in (small, large))
        if not self.settings.flat:
            return small, large
        flat, color = (copy_to_device(table, small.device) for table in (draw.flat[:, None], draw.color))
        flat, color = flat[..., None, None], color[..., None, None]
        return torch.where(flat, color, small), torch.where(flat, color, large)

    def draw(self, step: int) -> Draw:
        if (every := self.settings.renew_steps) and step // every != self._round:
            self._round = step // every
            self._load(self.pairs.variants(self._round))
        generator = torch.Generator().manual_seed(self.seed * 1_000_000_007 + step)
        crop, count = self.settings.crop_px, self.settings.batch
        chance = torch.rand(count, generator=generator, dtype=torch.float64) * self._chances[-1]
        image, top, left = self._candidates[torch.searchsorted(self._chances, chance, right=True)].unbind(1)
        offset = torch.randint(_spacing(crop), (2, count), generator=generator)
        height, width = self._sizes[image].unbind(1)
        orientation = torch.randint(8, (count,), generator=generator)
        flat = torch.rand(count, generator=generator) < self.settings.flat
        # Sampled from −0.25…1.25 and clamped to 0…1, so that a third of all channels are exactly 0 or 1.
        color = (1.5 * torch.rand((count, 3), generator=generator) - 0.25).clamp(0, 1)
        top, left = torch.minimum(top + offset[0], height - crop), torch.minimum(left + offset[1], width - crop)
        mix, shift = _draw_recoloring(count, self.settings.recolour, generator)
        return Draw(image, top, left, orientation, flat, (255 * color).round() / 255, mix, shift)


def _balance(chance: Tensor, shrink: Tensor, is_drawn: Tensor, settings: PhotoSettings) -> None:
    """Rescales `chance` so that all shrink factors are equally likely. `settings.drawn`, if set, becomes the
    probability of the subfolder `drawn`.

    Without this, a factor of 2 would be selected a quarter as often as a factor of 1, because its images have a quarter
    of the pixels.
    """
    if settings.drawn and not is_drawn.any():
        raise RedlineError(f"drawn = {settings.drawn}, but the folder of photos has no subfolder {DRAWN_FOLDER!r}.")
    for factor in settings.shrink:
        if not settings.drawn:
            chance[shrink == factor] /= chance[shrink == factor].sum()
            continue
        for drawn, share in ((True, settings.drawn), (False, 1 - settings.drawn)):
            chosen = (shrink == factor) & (is_drawn == drawn)
            chance[chosen] *= share / chance[chosen].sum()


def _recolored(crops_BCHW: Tensor, mix_BCC: Tensor, shift_BC: Tensor) -> Tensor:
    pixels = crops_BCHW.permute(0, 2, 3, 1)
    mixed = torch.baddbmm(shift_BC[:, None], pixels.flatten(1, 2), mix_BCC.mT)
    return mixed.view(pixels.shape).permute(0, 3, 1, 2)


def _draw_recoloring(count: int, share: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Samples color matrices (count, 3, 3) and shifts (count, 3), one per crop, that keep colors in [0, 1]."""
    order = torch.rand(count, 3, generator=generator).argsort(1)
    gain = 0.5 + 0.5 * torch.rand(count, 3, generator=generator)
    shift = (1 - gain) * torch.rand(count, 3, generator=generator)
    inverted = torch.rand(count, 1, generator=generator) < 0.5
    chosen = torch.rand(count, 1, generator=generator) < share
    order = torch.where(chosen, order, torch.arange(3))
    shift = torch.where(chosen, torch.where(inverted, shift + gain, shift), torch.zeros(()))
    gain = torch.where(chosen, torch.where(inverted, -gain, gain), torch.ones(()))
    return gain[:, :, None] * F.one_hot(order, 3).float(), shift


def _cut(pixels: Tensor, start: Tensor, width: Tensor, orientation: Tensor, side: int) -> Tensor:
    # Copies one small table; the pixel indices are computed on the device.
    table = copy_to_device(torch.stack((start, width, orientation)), pixels.device)
    start, width, orientation = table[:, :, None, None].unbind(0)
    along = torch.arange(side, device=pixels.device)
    down, across = along[None, :, None], along[None, None, :]
    down = torch.where(orientation & 1 == 0, down, side - 1 - down)
    across = torch.where(orientation & 2 == 0, across, side - 1 - across)
    offset = torch.where(orientation & 4 == 0, down * width + across, across * width + down)
    # The gathered pixels are (B, side, side, 3), so the permuted tensor is channels_last.
    return pixels[start + offset].permute(0, 3, 1, 2).float() / 255


def _candidates(high: Tensor, low: Tensor, scale: int, settings: PhotoSettings) -> tuple[Tensor, Tensor]:
    """Returns candidate positions for crops of a low-resolution image, (N, 2), and their sampling weights, (N,)."""
    crop, spacing = settings.crop_px, _spacing(settings.crop_px)
    lost = (high.float() - resize(low.float(), scale)).abs().mean(0, keepdim=True)
    lost = F.avg_pool2d(F.avg_pool2d(lost, scale), crop, spacing)[0].double().cpu()
    rows, columns = (torch.arange(count) * spacing for count in lost.shape)
    return torch.cartesian_prod(rows, columns), ((lost + _LEAST_LOSS) ** settings.focus).flatten()


def _spacing(crop_px: int) -> int:
    return math.ceil(crop_px / _CANDIDATES_PER_CROP)

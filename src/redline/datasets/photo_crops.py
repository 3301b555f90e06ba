"""Random crops of photos, large and small side by side, cut on the device that trains.

All photos stay on the device as bytes, in one row of pixels, and so do their small pictures. A batch is two gathers
whose indices hold place, flip and rotation at once: no worker processes, nothing to copy, and no device that waits for
data.

Most of a photo is sky or out of focus, and teaches little. So crops are drawn by what the bicubic loses in them, to the
power `focus`: 0 draws every place alike.

What is never drawn is never learnt: the corner of a white page is an edge of nothing, and came out grey. So a share of
the crops, `flat`, is of one colour, pure ones among them.

A few dozen photos are soon known by heart. Of a share of the crops, `recolour`, the channels are exchanged, weakened
and inverted: the bicubic is linear and keeps what is even, so that what it makes of the new picture is the new small
one, except where it overshot and was cut off.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from redline.datasets.bicubic import resize
from redline.datasets.photo_pairs import DRAWN_FOLDER, PhotoPairs, PhotoSettings, Variant
from redline.errors import RedlineError

# Places to draw from lie this many to a crop's side apart; a draw then moves by less than that.
_PLACES_PER_CROP = 4
# Even where the bicubic loses nothing there is a little to draw, in levels of 255.
_LEAST_LOSS = 0.5


@dataclass(frozen=True)
class Draw:
    """Which crops make up a batch: their picture, their place in the small one, one of eight turns, and colours."""

    picture: Tensor
    top: Tensor
    left: Tensor
    turn: Tensor
    flat: Tensor
    colour: Tensor
    mix: Tensor
    shift: Tensor


class PhotoCrops:
    """`batch(step)` gives small and large crops in [0, 1], the same for the same seed and step."""

    def __init__(self, settings: PhotoSettings, scale: int, device: torch.device, seed: int = 0) -> None:
        self.settings, self.scale, self.device, self.seed = settings, scale, device, seed
        self.pairs = PhotoPairs(settings, scale, device, seed)
        self._round: int | None = None
        if settings.renew_steps:
            self.pairs.decode()
        else:
            self._load(self.pairs)

    def _load(self, variants: Iterable[Variant]) -> None:
        large, small, sizes, places, chances, shrinks, are_drawn = [], [], [], [], [], [], []
        for shrink, high, low, drawn in variants:
            starts, chance = _places(high, low, self.scale, self.settings)
            places.append(F.pad(starts, (1, 0), value=len(sizes)))
            chances.append(chance)
            shrinks.append(torch.full(chance.shape, shrink))
            are_drawn.append(torch.full(chance.shape, drawn))
            sizes.append(low.shape[1:])
            large.append(high.permute(1, 2, 0).reshape(-1, 3))
            small.append(low.permute(1, 2, 0).reshape(-1, 3))
        self._large, self._small = torch.cat(large), torch.cat(small)
        self._sizes = torch.tensor(sizes)
        self._first = F.pad(self._sizes.prod(1).cumsum(0), (1, 0))[:-1]
        self._places, chance = torch.cat(places), torch.cat(chances)
        _balance(chance, torch.cat(shrinks), torch.cat(are_drawn), self.settings)
        self._chances = chance.cumsum(0)

    def _renew(self, step: int) -> None:
        """Loads the images of the step's round, if the photos are downscaled again every `renew_steps` steps."""
        if not self.settings.renew_steps or step // self.settings.renew_steps == self._round:
            return
        self._round = step // self.settings.renew_steps
        self._load(self.pairs.variants(self._round))

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """(B, 3, crop, crop) and (B, 3, scale·crop, scale·crop)."""
        draw, scale, crop = self.draw(step), self.scale, self.settings.crop_px
        first, width = self._first[draw.picture], self._sizes[draw.picture, 1]
        start = first + draw.top * width + draw.left
        start_large = (first * scale + draw.top * width * scale + draw.left) * scale
        small = _cut(self._small, start, width, draw.turn, crop)
        large = _cut(self._large, start_large, width * scale, draw.turn, crop * scale)
        if self.settings.recolour:
            mix, shift = (_sent(table, small.device) for table in (draw.mix, draw.shift))
            small, large = (_recoloured(crops, mix, shift) for crops in (small, large))
        if not self.settings.flat:
            return small, large
        flat, colour = (_sent(table, small.device)[..., None, None] for table in (draw.flat[:, None], draw.colour))
        return torch.where(flat, colour, small), torch.where(flat, colour, large)

    def draw(self, step: int) -> Draw:
        self._renew(step)
        generator = torch.Generator().manual_seed(self.seed * 1_000_000_007 + step)
        crop, count = self.settings.crop_px, self.settings.batch
        chance = torch.rand(count, generator=generator, dtype=torch.float64) * self._chances[-1]
        picture, top, left = self._places[torch.searchsorted(self._chances, chance, right=True)].unbind(1)
        moved = torch.randint(_apart(crop), (2, count), generator=generator)
        height, width = self._sizes[picture].unbind(1)
        turn = torch.randint(8, (count,), generator=generator)
        flat = torch.rand(count, generator=generator) < self.settings.flat
        # Half again as wide as what there is, so that a third of all channels are at an end.
        colour = (1.5 * torch.rand((count, 3), generator=generator) - 0.25).clamp(0, 1)
        top, left = torch.minimum(top + moved[0], height - crop), torch.minimum(left + moved[1], width - crop)
        mix, shift = _recolouring(count, self.settings.recolour, generator)
        return Draw(picture, top, left, turn, flat, (255 * colour).round() / 255, mix, shift)


def _balance(chance: Tensor, shrink: Tensor, is_drawn: Tensor, settings: PhotoSettings) -> None:
    """Gives every shrink factor the same chance, and drawn images their share of it.

    A photo reduced 2 times has a quarter of the places of the whole photo, and is worth as much.
    """
    if settings.drawn and not is_drawn.any():
        raise RedlineError(f"drawn = {settings.drawn}, but the photos have no folder {DRAWN_FOLDER!r}.")
    for factor in settings.shrink:
        if not settings.drawn:
            chance[shrink == factor] /= chance[shrink == factor].sum()
            continue
        for drawn, share in ((True, settings.drawn), (False, 1 - settings.drawn)):
            chosen = (shrink == factor) & (is_drawn == drawn)
            chance[chosen] *= share / chance[chosen].sum()


def _recoloured(crops_BCHW: Tensor, mix_BCC: Tensor, shift_BC: Tensor) -> Tensor:
    pixels = crops_BCHW.permute(0, 2, 3, 1)
    mixed = torch.baddbmm(shift_BC[:, None], pixels.flatten(1, 2), mix_BCC.mT)
    return mixed.view(pixels.shape).permute(0, 3, 1, 2)


def _recolouring(count: int, share: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A matrix and a shift for the channels of each crop, which keep them in [0, 1]; (count, 3, 3) and (count, 3)."""
    order = torch.rand(count, 3, generator=generator).argsort(1)
    gain = 0.5 + 0.5 * torch.rand(count, 3, generator=generator)
    shift = (1 - gain) * torch.rand(count, 3, generator=generator)
    inverted = torch.rand(count, 1, generator=generator) < 0.5
    chosen = torch.rand(count, 1, generator=generator) < share
    order = torch.where(chosen, order, torch.arange(3))
    shift = torch.where(chosen, torch.where(inverted, shift + gain, shift), torch.zeros(()))
    gain = torch.where(chosen, torch.where(inverted, -gain, gain), torch.ones(()))
    return gain[:, :, None] * F.one_hot(order, 3).float(), shift


def _cut(pixels: Tensor, start: Tensor, width: Tensor, turn: Tensor, side: int) -> Tensor:
    # One small table travels to the device; every index is made there.
    table = _sent(torch.stack((start, width, turn)), pixels.device)
    start, width, turn = table[:, :, None, None].unbind(0)
    along = torch.arange(side, device=pixels.device)
    down, across = along[None, :, None], along[None, None, :]
    down = torch.where(turn & 1 == 0, down, side - 1 - down)
    across = torch.where(turn & 2 == 0, across, side - 1 - across)
    offset = torch.where(turn & 4 == 0, down * width + across, across * width + down)
    # (B, side, side, 3) read as (B, 3, side, side) is channels_last already.
    return pixels[start + offset].permute(0, 3, 1, 2).float() / 255


def _sent(table: Tensor, device: torch.device) -> Tensor:
    if device.type == "cuda":
        table = table.pin_memory()  # from other memory a copy may wait for the device, and the host with it
    return table.to(device, non_blocking=True)


def _places(high: Tensor, low: Tensor, scale: int, settings: PhotoSettings) -> tuple[Tensor, Tensor]:
    """Where crops of a small picture can start, (N, 2), and how likely each is, (N,)."""
    crop, apart = settings.crop_px, _apart(settings.crop_px)
    lost = (high.float() - resize(low.float(), scale)).abs().mean(0, keepdim=True)
    lost = F.avg_pool2d(F.avg_pool2d(lost, scale), crop, apart)[0].double().cpu()
    rows, columns = (torch.arange(count) * apart for count in lost.shape)
    return torch.cartesian_prod(rows, columns), ((lost + _LEAST_LOSS) ** settings.focus).flatten()


def _apart(crop_px: int) -> int:
    return math.ceil(crop_px / _PLACES_PER_CROP)

"""What a poor camera makes of a clip: blur, too little light, a cast of colour, noise, and the blocks of compression.

What a clip suffers is drawn once for all of its frames; only the noise is new in each of them. A camera turns its gain
up where light is missing: little of the darkness is left to see, and the noise grows. B: clips.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from redline.datasets.clips.jpeg_artifacts import JpegArtifacts
from redline.datasets.clips.settings import ClipSettings
from redline.datasets.device_copy import send

_BLUR_REACH = 4
# How much of lost light a camera's automatic gain makes up for, as a share of its logarithm, at least and at most.
_MADE_UP = (0.6, 0.95)
# A quality that stands for no compression at all.
_UNTOUCHED = 101.0


@dataclass(frozen=True)
class Degradation:
    """`light_BC` is what is left of each colour; `read_B` and `shot_B` are noise that is there in the dark, and not."""

    blur_B: Tensor
    light_BC: Tensor
    read_B: Tensor
    shot_B: Tensor
    quality_B: Tensor

    @classmethod
    def draw(cls, settings: ClipSettings, clips: int, generator: torch.Generator) -> "Degradation":
        def some(most: float, often: float, *shape: int) -> Tensor:
            drawn = torch.rand(clips, *shape, generator=generator) * most
            chosen = torch.rand(clips, generator=generator) < often
            return drawn * chosen.view(-1, *[1] * len(shape))

        lit, cast = 1 - some(settings.dark, 0.6), some(2.0, 0.6, 3)
        least, most = _MADE_UP
        gain = lit ** -(least + (most - least) * torch.rand(clips, generator=generator))
        colour = torch.where((cast > 0).any(1, keepdim=True), 1 + settings.cast * (cast - 1), 1.0)
        light = (lit * gain)[:, None] * colour
        quality = settings.quality + (100 - settings.quality) * torch.rand(clips, generator=generator)
        untouched = torch.rand(clips, generator=generator) < 0.3
        return cls(
            some(settings.blur_px, 0.6),
            light.clamp(max=1.0 + settings.cast),
            gain * some(settings.noise, 0.9),
            gain.sqrt() * some(settings.noise, 0.7),  # its variance grows with the light that there was
            torch.where(untouched, _UNTOUCHED, quality.floor()),
        )

    def to(self, device: torch.device) -> "Degradation":
        return Degradation(*send([self.blur_B, self.light_BC, self.read_B, self.shot_B, self.quality_B], device))

    def target(self, clean_BCHW: Tensor, keep_B2: Tensor) -> Tensor:
        """What there is to restore: all of it, or with a share of the darkness (first) and the cast (second) kept."""
        brightness = self.light_BC.mean(1, keepdim=True)
        kept = brightness ** keep_B2[:, :1] * (self.light_BC / brightness) ** keep_B2[:, 1:]
        return (clean_BCHW * kept[:, :, None, None]).clamp(0, 1)

    def apply(self, clean_BCHW: Tensor, noise_BCHW: Tensor, blocking: JpegArtifacts) -> Tensor:
        """A frame as the camera gives it, in whole steps of 1/255."""
        picture = _blurred(clean_BCHW, self.blur_B) * self.light_BC[:, :, None, None]
        shot, read = (table[:, None, None, None] for table in (self.shot_B, self.read_B))
        # The darker the place, the fewer photons, and the less they vary.
        spread = (read.square() + shot.square() * picture.clamp_min(0)).sqrt()
        picture = (picture + spread * noise_BCHW).clamp(0, 1)
        untouched = (self.quality_B >= _UNTOUCHED)[:, None, None, None]
        return torch.where(untouched, (picture * 255).round() / 255, blocking(picture, self.quality_B))


def _blurred(picture_BCHW: Tensor, sigma_B: Tensor) -> Tensor:
    batch, channels, height, width = picture_BCHW.shape
    away = torch.arange(-_BLUR_REACH, _BLUR_REACH + 1, device=picture_BCHW.device)
    kernel = torch.exp(-away.square() / (2 * sigma_B[:, None].square() + 1e-6))
    kernel = (kernel / kernel.sum(1, keepdim=True)).repeat_interleave(channels, 0)[:, None, None]
    x = picture_BCHW.reshape(1, batch * channels, height, width)
    x = F.pad(x, (_BLUR_REACH,) * 4, mode="replicate")
    x = F.conv2d(F.conv2d(x, kernel, groups=batch * channels), kernel.mT, groups=batch * channels)
    return x.view(picture_BCHW.shape)

"""The degradation of a poor camera: blur, low light, a color cast, noise and JPEG artifacts.

All parameters are sampled once per clip; only the noise changes from frame to frame. In low light the camera raises its
gain, which restores most of the brightness and amplifies the noise. B: clips.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from redline.datasets.clips.jpeg_artifacts import JpegArtifacts
from redline.datasets.clips.settings import ClipSettings
from redline.datasets.device_copy import SampledTensors

_BLUR_RADIUS = 4
# Automatic gain restores a fraction of the lost light (in log space), sampled from this range.
_GAIN_SHARE = (0.6, 0.95)
# In place of a JPEG quality, this value means that the image is not compressed.
_UNCOMPRESSED = 101.0


@dataclass(frozen=True)
class Degradation(SampledTensors):
    """`light_BC` is the brightness factor of each channel. `read_B` is the standard deviation of the constant noise,
    `shot_B` that of the signal-dependent noise at full brightness."""

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
        least, most = _GAIN_SHARE
        gain = lit ** -(least + (most - least) * torch.rand(clips, generator=generator))
        colour = torch.where((cast > 0).any(1, keepdim=True), 1 + settings.cast * (cast - 1), 1.0)
        light = (lit * gain)[:, None] * colour
        quality = settings.quality + (100 - settings.quality) * torch.rand(clips, generator=generator)
        uncompressed = torch.rand(clips, generator=generator) < 0.3
        return cls(
            some(settings.blur_px, 0.6),
            light.clamp(max=1.0 + settings.cast),
            gain * some(settings.noise, 0.9),
            gain.sqrt() * some(settings.noise, 0.7),  # after gain, the variance is proportional to gain · brightness
            torch.where(uncompressed, _UNCOMPRESSED, quality.floor()),
        )

    def target(self, clean_BCHW: Tensor, keep_B2: Tensor) -> Tensor:
        """Returns the restoration target, which keeps the fractions `keep_B2` of the darkness and of the color cast."""
        brightness = self.light_BC.mean(1, keepdim=True)
        kept = brightness ** keep_B2[:, :1] * (self.light_BC / brightness) ** keep_B2[:, 1:]
        return (clean_BCHW * kept[:, :, None, None]).clamp(0, 1)

    def apply(self, clean_BCHW: Tensor, noise_BCHW: Tensor, jpeg: JpegArtifacts) -> Tensor:
        """Returns the degraded frame, with values rounded to multiples of 1/255."""
        image = _blurred(clean_BCHW, self.blur_B) * self.light_BC[:, :, None, None]
        shot, read = (table[:, None, None, None] for table in (self.shot_B, self.read_B))
        # The variance of shot noise is proportional to the brightness.
        std = (read.square() + shot.square() * image.clamp_min(0)).sqrt()
        image = (image + std * noise_BCHW).clamp(0, 1)
        uncompressed = (self.quality_B >= _UNCOMPRESSED)[:, None, None, None]
        return torch.where(uncompressed, (image * 255).round() / 255, jpeg(image, self.quality_B))


def _blurred(image_BCHW: Tensor, sigma_B: Tensor) -> Tensor:
    batch, channels, height, width = image_BCHW.shape
    offsets = torch.arange(-_BLUR_RADIUS, _BLUR_RADIUS + 1, device=image_BCHW.device)
    kernel = torch.exp(-offsets.square() / (2 * sigma_B[:, None].square() + 1e-6))
    kernel = (kernel / kernel.sum(1, keepdim=True)).repeat_interleave(channels, 0)[:, None, None]
    x = image_BCHW.reshape(1, batch * channels, height, width)
    x = F.pad(x, (_BLUR_RADIUS,) * 4, mode="replicate")
    x = F.conv2d(F.conv2d(x, kernel, groups=batch * channels), kernel.mT, groups=batch * channels)
    return x.view(image_BCHW.shape)

"""`drct` and `drct_l`: super-resolution of one tile by DRCT and by DRCT-L, four times larger.

Weights are drawn so that every part matters: products keep the size of what goes in, queries, keys and biases by
position are large enough that attention chooses, and norms are not the identity. With the usual small initial weights
the whole body adds next to nothing to the picture, and a rung could break it unseen.

What the limits mean, on a DRCT of two groups: weights and arithmetic in bf16 land at 61 dB, no biases by position at
43 dB, windows that are never shifted at 42 dB. The limit of 44 dB lies between.
"""

import torch
from torch import Tensor

from redline.ladder.gate import Gate
from redline.ladder.workload import Workload
from redline.models.drct import Drct, DrctConfig


def drct(batch: int = 1, size: int = 256, scale: int = 4) -> Workload:
    """DRCT (six groups, 14 million parameters) on `batch` tiles of `size` × `size`."""
    return super_resolution(DrctConfig.of(scale, 6), batch, size)


def drct_l(batch: int = 1, size: int = 256, scale: int = 4) -> Workload:
    """DRCT-L (twelve groups, 28 million parameters) on `batch` tiles of `size` × `size`."""
    return super_resolution(DrctConfig.of(scale, 12), batch, size)


def super_resolution(config: DrctConfig, batch: int, size: int) -> Workload:
    return Workload(
        build=lambda: draw(Drct(config)),
        inputs=lambda seed: smooth_pictures(batch, size),
        gates=(Gate("psnr", 44.0), Gate("relative_error", 0.035)),
        items=batch * size**2 * config.scale**2 / 1e6,
        unit="megapixel",
    )


def draw(model: Drct) -> Drct:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("relative_position_bias_table"):
                parameter.normal_(std=3.0)
            elif parameter.ndim >= 2:
                parameter.normal_(std=parameter[0].numel() ** -0.5)
                if name.endswith("qkv.weight"):
                    parameter[: 2 * len(parameter) // 3] *= 2.5
            elif name.endswith("weight"):
                parameter.normal_(1.0, 0.1)
            else:
                parameter.normal_(std=0.1)
    return model


def smooth_pictures(batch: int, size: int) -> Tensor:
    """Waves with edges in them, in [0, 1]; different in every batch."""
    y, x = torch.meshgrid(torch.arange(size) / 16, torch.arange(size) / 16, indexing="ij")
    down, right = 6.28 * torch.rand(2, batch, 3, 1, 1)
    colour = torch.arange(1, 4).view(1, 3, 1, 1)
    waves = 0.5 + 0.25 * torch.sin(x * colour + right) * torch.cos(y + down)
    return (waves + 0.2 * ((x + y + right) % 2 > 1)).clamp(0, 1)

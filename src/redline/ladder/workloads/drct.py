"""`drct` and `drct_l`: ×4 super-resolution of one tile by DRCT and by DRCT-L.

The random weights are such that every part affects the output: products preserve the scale of their input; queries,
keys and position biases are large enough for attention to be selective; and norms are not the identity. With the usual
small initial weights the blocks would add almost nothing to the image, so no gate would notice if a rung broke them.

How the limit was chosen: on a DRCT of two groups, bf16 weights and arithmetic reach 61 dB, but a model without position
biases reaches only 43 dB, and a model whose windows are never shifted 42 dB. The limit is 44 dB.
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
        inputs=lambda seed: smooth_images(batch, size),
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


def smooth_images(batch: int, size: int) -> Tensor:
    """Returns images of waves with sharp edges, with values in [0, 1]; every batch has different images."""
    y, x = torch.meshgrid(torch.arange(size) / 16, torch.arange(size) / 16, indexing="ij")
    down, right = 6.28 * torch.rand(2, batch, 3, 1, 1)
    colour = torch.arange(1, 4).view(1, 3, 1, 1)
    waves = 0.5 + 0.25 * torch.sin(x * colour + right) * torch.cos(y + down)
    return (waves + 0.2 * ((x + y + right) % 2 > 1)).clamp(0, 1)

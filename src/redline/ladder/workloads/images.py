"""Random images that a network with random weights can tell apart.

Plain noise is unsuitable as a test input: its average over an image is always the same, so a random network gives
nearly the same output for every image, and an error of a few percent can be as large as the whole effect of the input.
The images made here differ in overall color, in coarse shapes and in grain.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def random_images(batch: int, size: int | tuple[int, int], channels: int = 3) -> Tensor:
    """Returns square images of this size, or of (height, width), scaled like normalized photographs."""
    height, width = (size, size) if isinstance(size, int) else size
    color = F.normalize(torch.randn(batch, channels, 1, 1), dim=1)
    shapes = F.interpolate(torch.randn(batch, channels, 4, 4), size=(height, width), mode="bicubic")
    grain = torch.randn(batch, channels, height, width)
    return 2 * color + 0.5 * shapes + 0.25 * grain

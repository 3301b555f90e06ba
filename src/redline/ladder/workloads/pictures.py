"""Random pictures that a network with random weights can tell apart.

Plain noise is the wrong test input: averaged over a whole picture, one noise looks like any other, so a
random network gives nearly the same output for all of them, and an error of a few percent of the output is
then as large as everything that the input contributes. These pictures differ in overall colour, in coarse
shapes and in grain.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def pictures(batch: int, size: int) -> Tensor:
    """(B, 3, size, size), about as large as normalised photographs."""
    colour = F.normalize(torch.randn(batch, 3, 1, 1), dim=1)
    shapes = F.interpolate(torch.randn(batch, 3, 4, 4), size=(size, size), mode="bicubic")
    grain = torch.randn(batch, 3, size, size)
    return 2 * colour + 0.5 * shapes + 0.25 * grain

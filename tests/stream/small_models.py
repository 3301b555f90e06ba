"""A small random LSD whose output depends on all of its inputs, and a clip for it."""

from fractions import Fraction

import torch

from redline.models.lsd import Lsd, LsdConfig
from redline.stream.frames import Frame
from redline.stream.settings import Settings

SMALL = LsdConfig(patch=2, width=16, multipliers=(1, 2), attending=1)


def small_lsd(seed: int = 0, config: LsdConfig = SMALL, spread: float = 0.15) -> Lsd:
    """With a small `spread` a difference in one frame decays in later frames, as in a trained model."""
    torch.manual_seed(seed)
    model = Lsd(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            # As built, the last layers say nearly nothing.
            if name.startswith(("film", "head", "control")):
                weight.normal_(std=spread)
        # Weights of the last output around one would keep every difference for ever.
        blended = slice(3 * config.patch**2, None)
        model.head.weight[blended] *= 0.1
        model.head.bias[blended] *= 0.1
    return model


def clip(count: int, height: int, width: int, seed: int = 1, settings: Settings | None = None) -> list[Frame]:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (count, height, width, 3), dtype=torch.uint8, generator=generator)
    given = settings or Settings(strength=1.0)
    return [Frame(one, index, index, Fraction(1, 25), 0.0, settings=given) for index, one in enumerate(pixels)]

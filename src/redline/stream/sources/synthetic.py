"""A generated test clip. The same seed gives the same pixels on every machine.

A smooth periodic pattern moves by whole pixels, so frame n is exactly frame 0 rolled by n times the motion.
"""

import threading
from collections.abc import Generator
from fractions import Fraction
from functools import cached_property

import torch
from torch import Tensor

from redline.errors import RedlineError
from redline.stream.frames import Clock, Frame
from redline.stream.sources import LARGEST_PX

_WAVES = 6


class SyntheticClip:
    """A moving pattern; `motion` is (down, right) in pixels per frame. With `count` None the clip never ends."""

    is_live = False

    def __init__(
        self,
        height: int = 256,
        width: int = 256,
        count: int | None = 100,
        rate: Fraction = Fraction(25),
        motion: tuple[int, int] = (1, 2),
        seed: int = 0,
        clock: Clock | None = None,
    ) -> None:
        if height < 1 or width < 1 or rate <= 0 or (count is not None and count < 1):
            given = f"{width}×{height}, {rate}, {count}"
            raise RedlineError(f"invalid test clip: size, rate and length must be above 0, not {given}.")
        if height > LARGEST_PX or width > LARGEST_PX:
            raise RedlineError(f"invalid test clip: a side has at most {LARGEST_PX} pixels, not {width}×{height}.")
        self.name, self.height, self.width, self.rate = "test clip", height, width, Fraction(rate)
        self.motion, self._count, self._seed = motion, count, seed
        self._clock = clock or Clock()
        self._closed = threading.Event()

    @cached_property
    def _first(self) -> Tensor:
        # Computed for the first frame, not earlier, because the check that frames fit in memory comes first.
        return _pattern(self.height, self.width, self._seed)

    def pixels(self, index: int) -> Tensor:
        down, right = self.motion
        return self._first.roll((index * down % self.height, index * right % self.width), (0, 1))

    def frames(self) -> Generator[Frame, None, None]:
        index = 0
        while not self._closed.is_set() and (self._count is None or index < self._count):
            yield Frame(self.pixels(index), index, index, 1 / self.rate, self._clock.now_s(), duration=1)
            index += 1

    def close(self) -> None:
        self._closed.set()


def _pattern(height: int, width: int, seed: int) -> Tensor:
    """Sums waves with whole periods per side, in fp64, so that the rounded bytes do not depend on the machine."""
    generator = torch.Generator().manual_seed(seed)
    down_H1 = torch.arange(height, dtype=torch.float64)[:, None] / height
    right_W = torch.arange(width, dtype=torch.float64) / width
    image_HW3 = torch.zeros(height, width, 3, dtype=torch.float64)
    for channel in range(3):
        for _ in range(_WAVES):
            rows, columns = torch.randint(-3, 4, (2,), generator=generator).tolist()
            phase = float(torch.rand((), generator=generator, dtype=torch.float64))
            image_HW3[..., channel] += torch.sin(2 * torch.pi * (rows * down_H1 + columns * right_W + phase))
    return (127.5 + image_HW3 * (127.5 / _WAVES)).round().to(torch.uint8)

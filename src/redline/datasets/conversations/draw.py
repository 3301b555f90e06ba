"""A seeded random generator with the few kinds of draws that the topics need."""

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Draw:
    """Draws that are the same on every machine for the same seed, purpose and row."""

    def __init__(self, seed: int, purpose: str, row: int) -> None:
        # `random.Random` hashes a string seed with SHA-512, so the draws of neighbouring rows are unrelated.
        self._random = random.Random(f"{seed} {purpose} {row}")
        self.share = self._random.random

    def chance(self, share: float) -> bool:
        return self.share() < share

    def pick(self, options: Sequence[T]) -> T:
        return options[int(self.share() * len(options))]

    def whole(self, low: int, high: int) -> int:
        """Returns a whole number from `low` to `high`, both included."""
        return low + int(self.share() * (high - low + 1))

    def some(self, options: Sequence[T], count: int) -> list[T]:
        """Returns `count` different entries in random order."""
        return self._random.sample(options, count)

    def shuffled(self, options: Sequence[T]) -> list[T]:
        return self._random.sample(options, len(options))

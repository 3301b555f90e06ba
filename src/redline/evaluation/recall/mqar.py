"""Multi-query associative recall (MQAR): key-value pairs first, then the keys again at random places between fillers.

After each key the model must predict its value. Every sample has new pairs, so the model cannot memorize them.
"""

from dataclasses import dataclass

import torch

from redline.errors import ModelError
from redline.evaluation.recall.task import IGNORED, Sample
from redline.files.limits import PositiveInt


@dataclass(frozen=True)
class Mqar:
    """The task. Symbol 0 is the filler; the lower half of the other symbols are keys and the upper half values."""

    symbols: PositiveInt = 64
    pairs: PositiveInt = 6
    questions: PositiveInt = 24

    def __post_init__(self) -> None:
        if self.pairs > self.symbols // 2 - 1:
            keys = max(self.symbols // 2 - 1, 0)
            raise ModelError(f"{self.symbols} symbols give only {keys} keys: not enough for {self.pairs} pairs.")

    @property
    def vocabulary(self) -> int:
        return self.symbols

    def sample(self, generator: torch.Generator, batch: int, length: int) -> Sample:
        fixed, half = 2 * self.pairs, self.symbols // 2
        if length < fixed + self.questions:
            sizes = f"{self.pairs} pairs and {self.questions} questions"
            raise ModelError(f"{sizes} need {fixed + self.questions} tokens, not {length}.")
        keys = 1 + torch.rand(batch, half - 1, generator=generator).topk(self.pairs, dim=1).indices
        values = torch.randint(half, self.symbols, (batch, self.pairs), generator=generator)
        asked = torch.randint(self.pairs, (batch, self.questions), generator=generator)
        places = fixed + torch.rand(batch, length - fixed, generator=generator).topk(self.questions, dim=1).indices
        tokens, targets = torch.zeros(batch, length, dtype=torch.int64), torch.full((batch, length), IGNORED)
        tokens[:, :fixed] = torch.stack((keys, values), 2).flatten(1)
        tokens.scatter_(1, places, keys.gather(1, asked))
        targets.scatter_(1, places, values.gather(1, asked))
        return Sample(tokens, targets)

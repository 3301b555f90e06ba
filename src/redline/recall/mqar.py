"""Multi-query associative recall: pairs of symbols come first, and then their keys again and again, in any order.

After each key the model must say the value that it was paired with. Every sample has pairs of its own, so nothing but
memory helps.
"""

from dataclasses import dataclass

import torch

from redline.errors import ModelError
from redline.recall.task import IGNORED, Sample


@dataclass(frozen=True)
class Mqar:
    """The lower half of the symbols are keys, the upper half values."""

    symbols: int = 64
    pairs: int = 6

    @property
    def vocabulary(self) -> int:
        return self.symbols

    def sample(self, generator: torch.Generator, batch: int, length: int) -> Sample:
        if length <= 2 * self.pairs:
            raise ModelError(f"{self.pairs} pairs and a question need more than {2 * self.pairs} tokens, not {length}.")
        half, questions = self.symbols // 2, length - 2 * self.pairs
        keys = torch.rand(batch, half, generator=generator).topk(self.pairs, dim=1).indices
        values = torch.randint(half, self.symbols, (batch, self.pairs), generator=generator)
        asked = torch.randint(self.pairs, (batch, questions), generator=generator)
        tokens = torch.cat((torch.stack((keys, values), 2).flatten(1), keys.gather(1, asked)), 1)
        nothing = torch.full((batch, 2 * self.pairs), IGNORED)
        return Sample(tokens, torch.cat((nothing, values.gather(1, asked)), 1))

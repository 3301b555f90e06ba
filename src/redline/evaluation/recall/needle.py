"""Needle task: a few keys and their values are hidden in noise, and the end of the text queries each key."""

from dataclasses import dataclass

import torch

from redline.errors import ModelError
from redline.evaluation.recall.task import IGNORED, Sample
from redline.files.limits import PositiveInt


@dataclass(frozen=True)
class Needle:
    """The symbols are, in this order: values, keys, the query mark, noise."""

    keys: PositiveInt = 3
    values: PositiveInt = 16
    noises: PositiveInt = 32

    @property
    def vocabulary(self) -> int:
        return self.values + self.keys + 1 + self.noises

    def sample(self, generator: torch.Generator, batch: int, length: int) -> Sample:
        """Places each key and its value once; the text ends with the query mark and every key in random order."""
        asked, queries = 3 * self.keys, length - 3 * self.keys
        if queries < 2 * self.keys:
            raise ModelError(
                f"{self.keys} needles and their questions need {asked + 2 * self.keys} tokens, not {length}."
            )
        first_noise = self.vocabulary - self.noises
        tokens = torch.randint(first_noise, self.vocabulary, (batch, length), generator=generator)
        targets = torch.full((batch, length), IGNORED)
        values = torch.randint(self.values, (batch, self.keys), generator=generator)
        keys = torch.rand(batch, self.keys, generator=generator).argsort(1)
        # Needles start at even positions and are two tokens long, so that they do not overlap.
        places = 2 * torch.rand(batch, queries // 2, generator=generator).topk(self.keys, dim=1).indices
        tokens.scatter_(1, places, keys + self.values)
        tokens.scatter_(1, places + 1, values)
        order = torch.rand(batch, self.keys, generator=generator).argsort(1)
        marks = torch.full((batch, self.keys), self.values + self.keys)
        questions = torch.stack((marks, keys.gather(1, order) + self.values, values.gather(1, order)), 2)
        tokens[:, queries:] = questions.flatten(1)
        targets[:, queries + 1 :: 3] = values.gather(1, order)
        return Sample(tokens, targets)

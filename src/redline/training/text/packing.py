"""Packs documents into rows without padding: shuffled, concatenated and cut every `length` tokens.

Each row has the document number of every token, so that attention is masked to documents. The last token of a document
has no target. The order of the rows depends on the seed and the step alone, so a resumed run sees the same rows.

B: rows of a batch, S: tokens of a row.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from redline.errors import RedlineError
from redline.nn.packing import Packing
from redline.training.text.shards import Shard

NO_TARGET = -100  # the target that cross_entropy ignores
_MEAN_DOCUMENT = 600


@dataclass(frozen=True)
class Batch:
    """A batch in host memory; the target of a document's last token is `NO_TARGET`."""

    tokens_BS: Tensor
    targets_BS: Tensor
    packing: Packing

    @property
    def targets(self) -> int:
        """The number of tokens with a target."""
        return int((self.targets_BS != NO_TARGET).sum())

    def part(self, first: int, rows: int) -> "Batch":
        chosen = slice(first, first + rows)
        whole = rows == len(self.tokens_BS)
        packing = self.packing if whole else Packing.of(self.packing.documents_BS[chosen])
        return Batch(self.tokens_BS[chosen], self.targets_BS[chosen], packing)

    def inputs(self, device: torch.device) -> dict[str, Tensor]:
        """Returns the arguments of `LossModule`, copied to the device asynchronously."""
        parts = {"tokens_BS": self.tokens_BS, "targets_BS": self.targets_BS, **vars(self.packing)}
        if device.type == "cpu":
            return parts
        return {name: part.pin_memory().to(device, non_blocking=True) for name, part in parts.items()}


def synthetic_batch(rows: int, length: int, vocabulary: int, seed: int) -> Batch:
    """Returns a batch like those of a text, in host memory whatever the default device is.

    Token frequencies follow Zipf's law, so that the loss falls from the first step on. The lengths of documents vary as
    much as those of real documents.
    """
    random = torch.Generator("cpu").manual_seed(seed)
    uniform = torch.rand(rows, length + 1, generator=random, device="cpu")
    tokens = uniform.mul(math.log(vocabulary)).exp().long().clamp(1, vocabulary) - 1
    begins = torch.rand(rows, length + 1, generator=random, device="cpu") < 1 / _MEAN_DOCUMENT
    documents: Tensor = begins.cumsum(1)
    targets = torch.where(documents[:, 1:] == documents[:, :-1], tokens[:, 1:], NO_TARGET)
    return Batch(tokens[:, :-1].contiguous(), targets, Packing.of(documents[:, :-1].contiguous()))


class PackedRows:
    """The chosen documents of the shards as rows of `length` tokens, shuffled anew in each epoch."""

    def __init__(self, shards: tuple[Shard, ...], chosen: np.ndarray, length: int, seed: int) -> None:
        bases = np.cumsum([0, *(len(shard.tokens) for shard in shards)])
        starts = [shard.starts[:-1] + base for shard, base in zip(shards, bases, strict=False)]
        self._tokens, self._bases, self.length, self._seed = [shard.tokens for shard in shards], bases, length, seed
        self._starts = np.concatenate(starts)[chosen]
        self.lengths = np.concatenate([np.diff(shard.starts) for shard in shards])[chosen]
        self.rows = int(self.lengths.sum()) // length
        if not self.rows:
            raise RedlineError(
                f"{int(self.lengths.sum()):,} tokens do not fill one row of {length:,}: lower length under [data]."
            )
        self._order = lru_cache(2)(self._make_order)

    @property
    def attended(self) -> float:
        """The mean length of a token's document, of which only the part in the token's row counts."""
        _, ends, _ = self._order(0)
        total = self.rows * self.length
        borders = np.union1d(ends[ends < total], np.arange(0, total + 1, self.length))
        return float(np.square(np.diff(borders), dtype=np.float64).sum() / total)

    def batch(self, first: int, rows: int) -> Batch:
        """Returns rows `first`, `first + 1`, … of an endless sequence of epochs."""
        made = [self._row(*divmod(number, self.rows)) for number in range(first, first + rows)]
        tokens, targets, documents = (torch.from_numpy(np.stack(parts)) for parts in zip(*made, strict=True))
        return Batch(tokens, targets, Packing.of(documents))

    def _make_order(self, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the shuffled documents, the position where each ends, and the shuffled order of the rows."""
        random = np.random.Generator(np.random.Philox(key=(self._seed, epoch)))
        documents = random.permutation(len(self.lengths))
        return documents, np.cumsum(self.lengths[documents]), random.permutation(self.rows)

    def _row(self, epoch: int, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        documents, ends, rows = self._order(epoch)
        low = int(rows[number]) * self.length
        high = low + self.length
        first, last = np.searchsorted(ends, low, "right"), np.searchsorted(ends, high, "left") + 1
        ends, documents = ends[first:last], documents[first:last]
        begins = ends - self.lengths[documents]
        pieces = np.minimum(ends, high) - np.maximum(begins, low)
        addresses = np.repeat(self._starts[documents] - begins, pieces) + np.arange(low, high)
        closing = ends[ends <= high] - 1 - low
        following = addresses + 1
        following[closing] = addresses[closing]
        targets = self._gather(following)
        targets[closing] = NO_TARGET
        return self._gather(addresses), targets, np.repeat(np.arange(len(pieces), dtype=np.int32), pieces)

    def _gather(self, addresses: np.ndarray) -> np.ndarray:
        if len(self._tokens) == 1:
            return self._tokens[0][addresses].astype(np.int64)
        found = np.empty(len(addresses), dtype=np.int64)
        homes = np.searchsorted(self._bases, addresses, "right") - 1
        for home in np.unique(homes):
            inside = homes == home
            found[inside] = self._tokens[home][addresses[inside] - self._bases[home]]
        return found


def padding_share(lengths: np.ndarray, length: int, batch: int, seed: int = 0) -> float:
    """Returns the padded fraction without packing: each document has its own rows, padded to the batch's longest."""
    rest = lengths % length
    pieces = np.concatenate([np.full(int((lengths // length).sum()), length), rest[rest > 0]])
    np.random.default_rng(seed).shuffle(pieces)
    full = np.pad(pieces, (0, -len(pieces) % batch)).reshape(-1, batch)
    # The last batch may have fewer rows.
    rows = np.minimum(batch, len(pieces) - batch * np.arange(len(full)))
    return 1 - float(pieces.sum()) / float((full.max(1) * rows).sum())

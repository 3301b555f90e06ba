"""Packed rows hold every token once an epoch, keep documents apart, and depend on seed and place alone."""

import numpy as np
import pytest
import torch

from redline.errors import RedlineError
from redline.training.text.packing import NO_TARGET, PackedRows, padding_share
from redline.training.text.shards import Shard


def shards(sizes: list[list[int]]) -> tuple[tuple[Shard, ...], list[np.ndarray]]:
    """Every token is different, so that it says where it is from."""
    made, documents, number = [], [], 0
    for lengths in sizes:
        starts = np.cumsum([0, *lengths])
        tokens = np.arange(number, number + starts[-1], dtype=np.uint32)
        number += int(starts[-1])
        made.append(Shard(tokens, starts, np.zeros(len(lengths), np.uint64), 10**6, 0))
        documents += [tokens[starts[i] : starts[i + 1]] for i in range(len(lengths))]
    return tuple(made), documents


def random_sizes(count: int) -> list[int]:
    return [int(n) for n in np.random.default_rng().integers(1, 60, count)]


@pytest.mark.parametrize("parts", [1, 3])
def test_rows_against_a_plain_loop(parts: int) -> None:
    some, documents = shards([random_sizes(23) for _ in range(parts)])
    chosen = np.sort(np.random.default_rng().permutation(len(documents))[: len(documents) - 2])
    packed = PackedRows(some, chosen, 37, seed=5)
    of_document = {int(t): (d, i) for d, tokens in enumerate(documents) for i, t in enumerate(tokens)}
    seen: list[int] = []
    batch = packed.batch(0, packed.rows)
    assert batch.tokens_BS.shape == (packed.rows, 37) and batch.tokens_BS.dtype == torch.int64
    for tokens, targets, numbers, positions in zip(
        *(
            part.tolist()
            for part in (batch.tokens_BS, batch.targets_BS, batch.packing.documents_BS, batch.packing.positions_BS)
        ),
        strict=True,
    ):
        seen += tokens
        number = position = -1
        before = None
        for token, target, given_number, given_position in zip(tokens, targets, numbers, positions, strict=True):
            document, index = of_document[token]
            number, position = (number, position + 1) if document == before else (number + 1, 0)
            before = document
            assert (given_number, given_position) == (number + batch.packing.documents_BS[0, 0].item(), position)
            last = index == len(documents[document]) - 1
            assert target == (NO_TARGET if last else documents[document][index + 1])
    assert batch.targets == (batch.targets_BS >= 0).sum()
    assert len(seen) == len(set(seen))  # no token twice in an epoch
    allowed = {int(t) for d in chosen for t in documents[d]}
    assert set(seen) <= allowed and len(allowed) - len(seen) < 37


def test_the_order_depends_on_seed_epoch_and_place_alone() -> None:
    some, documents = shards([random_sizes(40)])
    everything = np.arange(len(documents))
    one, same, other = (PackedRows(some, everything, 16, seed) for seed in (1, 1, 2))
    jump = same.batch(3 * one.rows - 2, 5).tokens_BS  # across an epoch's end, before anything else was asked for
    straight = torch.cat([one.batch(n, 1).tokens_BS for n in range(3 * one.rows - 2, 3 * one.rows + 3)])
    assert torch.equal(jump, straight)
    epochs = [one.batch(n * one.rows, one.rows).tokens_BS for n in range(2)]
    assert not torch.equal(*epochs) and not torch.equal(epochs[0], other.batch(0, one.rows).tokens_BS)


def test_too_little_text_for_a_row() -> None:
    some, _ = shards([[5, 6]])
    assert PackedRows(some, np.arange(2), 11, 0).rows == 1
    with pytest.raises(RedlineError, match="11 tokens do not fill one row of 12"):
        PackedRows(some, np.arange(2), 12, 0)


def test_padding_share() -> None:
    # Alone in a batch, nothing is padded; two beside each other are filled up to the longer.
    assert padding_share(np.array([3, 9, 4]), 10, 1) == 0
    assert padding_share(np.array([2, 8]), 10, 2) == pytest.approx(1 - 10 / 16)
    assert padding_share(np.array([25]), 10, 3) == pytest.approx(1 - 25 / 30)
    assert padding_share(np.array([25]), 10, 8) == pytest.approx(1 - 25 / 30)
    assert 0.3 < padding_share(np.array(random_sizes(5000)), 64, 64) < 0.6


def test_attended_length_agrees_with_a_plain_loop() -> None:
    some, documents = shards([random_sizes(40)])
    packed = PackedRows(some, np.arange(len(documents)), 37, seed=5)
    numbers_BS = packed.batch(0, packed.rows).packing.documents_BS.tolist()
    lengths = [row.count(number) for row in numbers_BS for number in row]
    assert packed.attended == pytest.approx(sum(lengths) / len(lengths))
    whole, _ = shards([[37] * 5])
    assert PackedRows(whole, np.arange(5), 37, seed=0).attended == 37

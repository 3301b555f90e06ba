"""Prefill in parts gives what one pass gives, for any split, any rows, and rings that wrap."""

import random
from copy import deepcopy
from dataclasses import replace
from itertools import accumulate

import pytest
import torch

from redline.errors import ModelError
from redline.models.decoder import Decoder, DecoderConfig

CONFIG = DecoderConfig(53, 24, 3, 4, 40, key_value_heads=2, context=200, windows=(None, 6, 70))


@pytest.fixture
def model() -> Decoder:
    model = Decoder(CONFIG).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


@torch.no_grad()
@pytest.mark.parametrize("split", ["whole", "chunks", "chunks longer than a window", "steps", "mixed"])
def test_any_split_gives_what_one_pass_gives(split: str, model: Decoder) -> None:
    length = 90
    tokens = torch.randint(53, (3, length))
    expected = model(tokens)
    sizes = {
        "whole": [length],
        "chunks": [5] * 18,
        "chunks longer than a window": [40, 41, 9],
        "steps": [1] * length,
        "mixed": random.choice([[7, 1, 1, 30, 1, 50], [1, 1, 1, 87]]),
    }[split]
    cache = model.new_cache(3, 97)
    for end, size in zip(accumulate(sizes), sizes, strict=True):
        part = tokens[:, end - size : end]
        counts = torch.full((3,), size)
        logits = model.prefill(part, counts, cache)
        assert torch.allclose(logits, expected[:, end - 1], atol=1e-4), (end, size)
    assert cache.lengths_B.tolist() == [length] * 3


@torch.no_grad()
def test_rows_of_different_lengths_are_independent(model: Decoder) -> None:
    lengths, chunk = [81, 1, 33, 80], 16
    tokens = torch.randint(53, (4, 130))
    expected = model(tokens)
    cache = model.new_cache(4, 120)
    last: dict[int, torch.Tensor] = {}
    for begin in range(0, max(lengths), chunk):
        counts = torch.tensor([min(max(length - begin, 0), chunk) for length in lengths])
        part = tokens[:, begin : begin + chunk].clone()
        part[torch.arange(chunk) >= counts[:, None]] = 52  # padding must leave no trace
        logits = model.prefill(part, counts, cache)
        last |= {row: logits[row] for row in range(4) if counts[row]}
    for row, length in enumerate(lengths):
        assert torch.allclose(last[row], expected[row, length - 1], atol=1e-4)
    at = torch.tensor(lengths)
    for _ in range(30):
        logits = model.prefill(tokens[torch.arange(4), at][:, None], torch.ones(4).long(), cache)
        assert torch.allclose(logits, expected[torch.arange(4), at], atol=1e-4)
        at += 1


def test_no_slot_is_written_twice_in_one_chunk(model: Decoder) -> None:
    """On a GPU such writes have no order; on a CPU the last happens to stay."""
    cache = model.new_cache(2, 200)
    for past in cache.chunk_pasts(torch.tensor([150, 40]), 160):
        unseen = past.layer.keys_BCGD.shape[1] - 1
        for row, count in enumerate((150, 40)):
            places = [place for place in past.slots_BS[row].tolist() if place != unseen]
            assert len(set(places)) == len(places) == min(count, past.layer.ring)


def test_masks_are_shared_and_level_rows_need_none() -> None:
    model = Decoder(replace(CONFIG, windows=(None, 6, None))).eval()
    cache = model.new_cache(2, 100)
    kinds = []
    for counts in ([20, 20], [20, 11], [20, 20]):
        pasts = cache.chunk_pasts(torch.tensor(counts), 20)
        kinds.append([type(past).__name__ for past in pasts])
        cache.lengths_B += torch.tensor(counts)
    assert kinds == [["StartPast"] * 3, ["LevelPast", "ChunkPast", "LevelPast"], ["ChunkPast"] * 3]
    assert pasts[0].sees_B1SC is pasts[2].sees_B1SC is not pasts[1].sees_B1SC


@torch.no_grad()
def test_a_copy_is_independent_and_a_reset_empties_the_cache(model: Decoder) -> None:
    tokens = torch.randint(53, (1, 40))
    expected = model(tokens)
    cache = model.new_cache(1, 64)
    model.prefill(tokens[:, :20], torch.tensor([20]), cache)
    other = deepcopy(cache)
    for index in range(20, 30):
        model.prefill((tokens[:, index, None] + 1) % 53, torch.tensor([1]), other)
    assert torch.allclose(model.prefill(tokens[:, 20, None], torch.tensor([1]), cache), expected[:, 20], atol=1e-4)
    places = [layer.keys_BCGD.data_ptr() for layer in cache.layers]
    cache.reset()
    found = model.prefill(tokens, torch.tensor([40]), cache)
    assert torch.allclose(found, expected[:, -1], atol=1e-4)
    assert places == [layer.keys_BCGD.data_ptr() for layer in cache.layers]


def test_a_window_layer_holds_its_window_only(model: Decoder) -> None:
    cache = model.new_cache(2, 200)
    places = [layer.keys_BCGD.shape[1] for layer in cache.layers]
    assert places == [256, 64, 128] and [layer.ring for layer in cache.layers] == [200, 6, 70]
    assert cache.bytes == 2 * 2 * sum(places) * 2 * 6 * 4


@torch.no_grad()
def test_too_many_tokens_raise(model: Decoder) -> None:
    cache = model.new_cache(2, 10)
    model.prefill(torch.zeros(2, 8, dtype=torch.long), torch.tensor([8, 3]), cache)
    with pytest.raises(ModelError, match="holds at most 10 tokens"):
        model.prefill(torch.zeros(2, 4, dtype=torch.long), torch.tensor([3, 4]), cache)
    # Padding beyond the room is no token.
    model.prefill(torch.zeros(2, 4, dtype=torch.long), torch.tensor([2, 4]), cache)
    with pytest.raises(ModelError, match="exceeds the model's context of 200"):
        model.new_cache(1, 201)
    with pytest.raises(ModelError, match="1 row and 1 token"):
        model.new_cache(0, 5)

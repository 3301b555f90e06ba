"""Flat calls over pages give what one pass gives, whatever rows of single tokens and of prompts they mix."""

import random

import pytest
import torch
from torch import Tensor

from redline.models.decoder import Decoder, DecoderConfig
from redline.models.decoder.paged_cache import FlatCall, PagePool
from redline.ops.paged_attention import PagedRows

CONFIG = DecoderConfig(53, 24, 3, 4, 40, key_value_heads=2, context=200, windows=(None, 6, 70), query_key_norm=True)
SIZE, ROWS, WIDTH = 8, 4, 13


@pytest.fixture
def model() -> Decoder:
    model = Decoder(CONFIG).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def flat_call(pool: PagePool, counts: list[int], lengths: list[int], tables: Tensor) -> FlatCall:
    """Asks for the logits after every token."""
    row = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    starts = torch.tensor([0, *counts]).cumsum(0)
    positions = torch.arange(len(row)) - starts[row] + torch.tensor(lengths)[row]
    slots = tables[row, positions // SIZE] * SIZE + positions % SIZE
    paged = PagedRows(slots, starts, torch.tensor(lengths), tables, singles=len(counts))
    return FlatCall(positions, torch.arange(len(row)), paged, pool)


@torch.no_grad()
def test_any_mix_of_rows_gives_what_one_pass_gives(model: Decoder) -> None:
    texts, choice = torch.randint(53, (ROWS, 100)), random.Random(0)
    expected = model(texts)
    pool, tables = model.new_pages(60, SIZE), torch.randperm(60)[: ROWS * WIDTH].view(ROWS, WIDTH)
    lengths = [0] * ROWS
    while min(lengths) < 100:
        counts = [min(choice.choice((0, 1, 1, 7, 30)), 100 - length) for length in lengths]
        if not sum(counts):
            continue
        parts = [
            texts[row, length : length + count] for row, (length, count) in enumerate(zip(lengths, counts, strict=True))
        ]
        found = model.flat(torch.cat(parts), flat_call(pool, counts, lengths, tables))
        for row, part in enumerate(found.split(counts)):
            assert torch.allclose(part, expected[row, lengths[row] : lengths[row] + counts[row]], atol=1e-4)
        lengths = [length + count for length, count in zip(lengths, counts, strict=True)]


@torch.no_grad()
def test_a_compiled_step_is_one_graph_for_every_position(model: Decoder) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    step = torch.compile(model.flat, fullgraph=True, backend=counter)
    tables = torch.arange(2 * WIDTH).view(2, WIDTH)
    pools = [model.new_pages(2 * WIDTH, SIZE) for _ in range(2)]
    for position in range(75):
        tokens = torch.randint(53, (2,))
        one, other = (flat_call(pool, [1, 1], [position, position], tables) for pool in pools)
        assert torch.allclose(step(tokens, one), model.flat(tokens, other), atol=1e-5)
    assert counter.frame_count == 1


def test_pages_take_the_memory_of_their_keys_and_values(model: Decoder) -> None:
    pool = model.new_pages(10, SIZE)
    assert pool.bytes == 3 * 2 * 10 * SIZE * 2 * 6 * 4 and pool.page_size == SIZE
    assert all(not pages.any() for layer in pool.layers for pages in layer)
    assert model.bfloat16().new_pages(10, SIZE).layers[0][0].dtype == torch.bfloat16

"""Tests the reference and the implementation for CPUs against attention over each row's own tokens."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from redline.errors import ModelError
from redline.ops.paged_attention import PagedRows, paged_attention

from .paged_examples import example

CASES = [
    ([1, 1, 1, 1, 1], [0, 3, 16, 15, 200]),
    ([1, 1, 5, 16, 33], [40, 31, 0, 16, 7]),
    ([20], [0]),
    ([1], [0]),
]


def attended(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """The last queries over all keys, whose positions end together."""
    whole, count = len(k), len(q)
    ago = torch.arange(whole - count, whole)[:, None] - torch.arange(whole)
    sees = (ago >= 0) & (ago < (window or whole))
    heads = q.shape[1] // k.shape[1]
    q, k, v = (one.transpose(0, 1) for one in (q, k.repeat_interleave(heads, 1), v.repeat_interleave(heads, 1)))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=sees).transpose(0, 1)


@pytest.mark.cpu
@pytest.mark.parametrize("implementation", ["reference", "auto"])
@pytest.mark.parametrize("window", [None, 6, 100])
@pytest.mark.parametrize(("counts", "lengths"), CASES)
def test_each_row_attends_to_its_own_tokens(
    counts: list[int], lengths: list[int], window: int | None, implementation: str
) -> None:
    q, k, v, keys, values, rows = example(counts, lengths, 6, 2, 8, torch.float64, padding=3)
    given = keys.clone()
    found = paged_attention(q, k, v, keys, values, rows, window, implementation)
    begin = 0
    for row, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        end, whole = begin + count, length + count
        at = [int(rows.tables_RW[row, place // 16]) * 16 + place % 16 for place in range(whole)]
        own_keys, own_values = (held.flatten(0, 1)[at] for held in (keys, values))
        assert torch.equal(own_keys[length:], k[begin:end]) and torch.equal(own_values[length:], v[begin:end])
        assert torch.equal(own_keys[:length], given.flatten(0, 1)[at[:length]])
        torch.testing.assert_close(found[begin:end], attended(q[begin:end], own_keys, own_values, window))
        begin = end
    written = (~keys.isnan()).sum() - (~given.isnan()).sum()
    assert written == k[:begin].numel()


def test_rows_that_share_pages_in_one_step_see_what_the_other_writes() -> None:
    q, k, v, keys, values, rows = example([16, 5], [0, 0], 2, 1, 4, torch.float64)
    tables = rows.tables_RW.clone()
    tables = torch.stack((torch.cat((tables[0], tables[0])), torch.cat((tables[0], tables[1]))))
    slots = torch.cat((rows.slots_T[:16], tables[1, 1] * 16 + torch.arange(5)))
    shared = replace(rows, tables_RW=tables, lengths_R=torch.tensor([0, 16]), slots_T=slots)
    for implementation in ("reference", "sdpa"):
        found = paged_attention(
            q, k, v, keys.clone(), values.clone(), replace(shared, prepared=None), None, implementation
        )
        torch.testing.assert_close(found[16:], attended(q[16:], k, v, None))


def test_a_row_does_not_depend_on_the_others() -> None:
    q, k, v, keys, values, rows = example([1, 1, 1], [30, 900, 5], 4, 2, 8, torch.float32)
    together = paged_attention(q, k, v, keys, values, rows)
    for row in range(3):
        numbers = (rows.slots_T[row, None], torch.tensor([0, 1]), rows.lengths_R[row, None], rows.tables_RW[row, None])
        one = slice(row, row + 1)
        alone = paged_attention(q[one], k[one], v[one], keys, values, PagedRows(*numbers, singles=1))
        torch.testing.assert_close(alone[0], together[row], atol=1e-6, rtol=1e-6)


def test_invalid_arguments_are_refused() -> None:
    q, k, v, keys, values, rows = example([1, 4], [3, 9], 4, 2, 6, torch.float32)
    for wrong, words in (
        ((q[:, :3], k, v, keys, values, rows), "the 3 query heads must be a multiple of the 2"),
        ((q, k, v, keys, values[1:], rows), "values_NPGD must have shape"),
        ((q, k, v, keys, values, replace(rows, starts_E=rows.starts_E[1:])), "starts_E must have 3 numbers for 2 rows"),
        (
            (q, k, v, keys, values, replace(rows, singles=3)),
            "prompts must be from 0 to singles, singles at most the 2 rows",
        ),
        ((q, k, v, keys, values, rows, 0), "window at least 1, not 0, 1, 256 and 0"),
        ((q.half(), k, v, keys, values, rows), "k_TGD is torch.float32, but q_THD is torch.float16"),
        ((q, k, v, keys.transpose(0, 1), values.transpose(0, 1), rows), "must be contiguous"),
    ):
        with pytest.raises(ModelError, match=words):
            paged_attention(*wrong)

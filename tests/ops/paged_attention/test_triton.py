"""Tests the Triton kernels of paged attention, on a GPU or interpreted on a CPU."""

from dataclasses import replace

import pytest
import torch

from redline.ops.paged_attention import ALL, paged_attention, reference

from .paged_examples import example

triton = pytest.importorskip("redline.ops.paged_attention.triton")
DEVICE = "cpu" if triton.kernel.INTERPRETED else "cuda"
DTYPES = [torch.float32, torch.float16] + ([] if triton.kernel.INTERPRETED else [torch.bfloat16])

pytestmark = pytest.mark.skipif(
    not triton.kernel.INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA device or TRITON_INTERPRET=1"
)


def check(
    counts: list[int],
    lengths: list[int],
    heads: int,
    groups: int,
    dtype: torch.dtype,
    window: int | None = None,
    split: int = 256,
) -> None:
    q, k, v, keys, values, rows = example(counts, lengths, heads, groups, 16, dtype, padding=2, device=DEVICE)
    rows = replace(rows, split=split)
    exact = [tensor.double() for tensor in (q, k, v, keys, values)]
    expected = reference.paged_attention(*exact, rows, window)
    with torch.no_grad():
        found = paged_attention(q, k, v, keys, values, rows, window, "triton")
    real = sum(counts)
    assert found.dtype == dtype and torch.isfinite(found[:real]).all()
    # Probabilities are rounded to the dtype before the product with the values.
    limit = 4 * torch.finfo(dtype).eps if dtype != torch.float32 else 1e-5
    assert (found[:real].double() - expected[:real]).norm() <= limit * expected[:real].norm()
    for one, other in ((keys, exact[3]), (values, exact[4])):
        assert torch.equal(one.double().nan_to_num(7), other.nan_to_num(7))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 20])
def test_rows_that_decode_agree(window: int | None, dtype: torch.dtype) -> None:
    check([1, 1, 1, 1], [0, 15, 63, 130], 6, 2, dtype, window)


@pytest.mark.parametrize("window", [None, 70])
def test_splits_agree(window: int | None) -> None:
    check([1, 1, 1], [0, 200, 63], 4, 4, torch.float32, window, split=64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 9])
def test_mixed_rows_agree(window: int | None, dtype: torch.dtype) -> None:
    check([1, 1, 37, 2, 70, 16], [40, 3, 0, 31, 5, 64], 6, 2, dtype, window)


@pytest.mark.parametrize(("counts", "lengths"), [([65, 3], [0, 10]), ([40], [3]), ([1], [5])])
def test_prompts_and_rows_alone_agree(counts: list[int], lengths: list[int]) -> None:
    check(counts, lengths, 1, 1, torch.float32)


@pytest.mark.parametrize("singles", [0, 2])
def test_the_bounds_of_the_work_change_nothing(singles: int) -> None:
    """Rows without tokens, and tokens of padding, as in a captured step."""
    q, k, v, keys, values, rows = example([1, 1, 37, 2, 0], [40, 3, 0, 31, 0], 6, 2, 16, torch.float32, device=DEVICE)
    expected = reference.paged_attention(q, k, v, keys, values, rows)
    for part in (replace(rows, singles=2, prompts=min(singles, 2)), replace(rows, singles=ALL, prompts=0)):
        with torch.no_grad():
            found = paged_attention(q, k, v, keys, values, part, None, "triton")
        torch.testing.assert_close(found, expected)


def test_a_row_has_the_same_bits_alone_and_among_others() -> None:
    q, k, v, keys, values, rows = example([1, 1, 1], [30, 290, 5], 4, 2, 16, torch.float32, device=DEVICE)
    with torch.no_grad():
        together = paged_attention(q, k, v, keys, values, rows, None, "triton")
        one = slice(1, 2)
        alone = replace(
            rows,
            slots_T=rows.slots_T[one],
            starts_E=rows.starts_E[:2],
            lengths_R=rows.lengths_R[one],
            tables_RW=rows.tables_RW[one],
            singles=1,
        )
        found = paged_attention(q[one], k[one], v[one], keys, values, alone, None, "triton")
    assert torch.equal(found[0], together[1])


@pytest.mark.gpu
def test_a_cuda_graph_replay_is_right_for_every_length() -> None:
    q, k, v, keys, values, rows = example([1, 1], [700, 40], 32, 8, 64, torch.bfloat16, device="cuda")
    keys.nan_to_num_(), values.nan_to_num_()
    with torch.no_grad():
        paged_attention(q, k, v, keys, values, rows)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replayed = paged_attention(q, k, v, keys, values, rows)
        for length in (700, 3, 255, 256):
            rows.lengths_R.fill_(length)
            page = rows.tables_RW[:, length // 16] * 16 + length % 16
            rows.slots_T.copy_(page)
            graph.replay()
            assert torch.equal(replayed, paged_attention(q, k, v, keys, values, rows))


@torch.no_grad()
def test_compiles_without_graph_breaks() -> None:
    def attended(q: torch.Tensor, *given: torch.Tensor) -> list[torch.Tensor]:
        return [paged_attention(2 * q, *given, rows, None, "triton")[:8], given[2].nan_to_num(), given[3].nan_to_num()]

    *given, rows = example([1, 7], [4, 20], 4, 2, 16, torch.float32, device=DEVICE)
    compiled = torch.compile(attended, fullgraph=True, backend="inductor" if DEVICE == "cuda" else "aot_eager")
    again = [tensor.clone() for tensor in given]
    for one, other in zip(compiled(*given), attended(*again), strict=True):
        torch.testing.assert_close(one, other)

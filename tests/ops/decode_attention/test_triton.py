"""Tests the Triton kernels of decode attention, on a GPU or interpreted on a CPU."""

from dataclasses import replace

import pytest
import torch

from redline.ops.decode_attention import decode_attention, reference

from .decode_examples import example

triton = pytest.importorskip("redline.ops.decode_attention.triton")
DEVICE = "cpu" if triton.kernel.INTERPRETED else "cuda"
DTYPES = [torch.float32, torch.float16] + ([] if triton.kernel.INTERPRETED else [torch.bfloat16])
LENGTHS = [0, 17, 69, 70, 205]

pytestmark = pytest.mark.skipif(
    not triton.kernel.INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA device or TRITON_INTERPRET=1"
)


def check(ring: int, lengths: list[int], heads: int, groups: int, dim: int, dtype: torch.dtype) -> None:
    q, k, v, keys, values, held = example(ring, lengths, heads, groups, dim, dtype, DEVICE)
    exact = [t.double() for t in (q, k, v, keys, values)]
    expected = reference.decode_attention(*exact, held, ring)
    with torch.no_grad():
        found = decode_attention(q, k, v, keys, values, held, ring, "triton")
    assert found.dtype == dtype and torch.isfinite(found).all()
    # Probabilities are rounded to the dtype before the product with the values.
    limit = 4 * torch.finfo(dtype).eps if dtype != torch.float32 else 1e-5
    assert (found.double() - expected).norm() <= limit * expected.norm()
    for one, other in ((keys, exact[3]), (values, exact[4])):
        assert torch.equal(one.double().nan_to_num(7), other.nan_to_num(7))


@pytest.mark.parametrize(("heads", "groups", "dim", "dtype"), [(4, 4, 40, DTYPES[0]), *((6, 2, 16, d) for d in DTYPES)])
def test_agrees_with_one_split(heads: int, groups: int, dim: int, dtype: torch.dtype) -> None:
    check(70, LENGTHS, heads, groups, dim, dtype)


@pytest.mark.parametrize(("splits", "dtype"), [(2, DTYPES[0]), *((5, dtype) for dtype in DTYPES[1:])])
def test_agrees_with_several_splits(splits: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "splits_for", lambda *_: splits)
    monkeypatch.setattr(triton, "TILES", replace(triton.TILES, block=16))
    check(70, LENGTHS, 5, 1, 16, dtype)


def test_splits_depend_on_shapes_only() -> None:
    assert triton.splits_for(8, 255, 132) == 1
    assert triton.splits_for(8, 4096, 132) == 16
    assert triton.splits_for(200, 4096, 132) == 1
    assert triton.splits_for(1, 131_072, 132) == 64


def test_passes_opcheck_with_a_mutated_ring() -> None:
    q, k, v, keys, values, held = example(9, [4, 20], 4, 2, 16, torch.float32, DEVICE)
    keys.nan_to_num_(), values.nan_to_num_()
    torch.library.opcheck(triton.decode_attention, (q, k, v, keys, values, held, 9))


@pytest.mark.gpu
@pytest.mark.parametrize("ring", [200, 5000])
def test_a_cuda_graph_replay_is_deterministic_for_every_length(ring: int) -> None:
    q, k, v, keys, values, held = example(ring, [0, 90], 32, 8, 64, torch.bfloat16, "cuda")
    keys.nan_to_num_(), values.nan_to_num_()
    with torch.no_grad():
        decode_attention(q, k, v, keys, values, held, ring)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replayed = decode_attention(q, k, v, keys, values, held, ring)
        for lengths in ([0, 3], [ring - 1, ring], [3 * ring + 7, 150]):
            held.copy_(torch.tensor(lengths))
            graph.replay()
            again = decode_attention(q, k, v, keys, values, held, ring)
            assert torch.equal(replayed, again)


@torch.no_grad()
def test_compiles_without_graph_breaks() -> None:
    """Later operations of the same graph see what it writes into the ring."""

    def attended(q: torch.Tensor, *given: torch.Tensor) -> list[torch.Tensor]:
        return [decode_attention(2 * q, *given, 9, "triton"), given[2].nan_to_num(), given[3].nan_to_num()]

    compiled = torch.compile(attended, fullgraph=True, backend="inductor" if DEVICE == "cuda" else "aot_eager")
    given = example(9, [4, 20], 4, 2, 16, torch.float32, DEVICE)
    again = [tensor.clone() for tensor in given]
    for one, other in zip(compiled(*given), attended(*again), strict=True):
        torch.testing.assert_close(one, other)

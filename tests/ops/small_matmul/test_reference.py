"""Tests which implementation of small_matmul runs, which arguments are refused, and the reference."""

import pytest
import torch
from torch import Tensor

from redline.errors import MachineError, ModelError
from redline.ops.small_matmul import reference, small_matmul, tiles

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_agrees_with_its_definition(dtype: torch.dtype) -> None:
    x, w, bias = (torch.randn(shape, dtype=dtype, requires_grad=True) for shape in ((3, 7), (5, 7), (5,)))
    expected = (x[:, None] * w).sum(2) + bias
    torch.testing.assert_close(small_matmul(x, w, bias), expected)
    torch.testing.assert_close(small_matmul(x, w), expected - bias)


def test_passes_gradcheck() -> None:
    x, w, bias = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 7), (5, 7), (5,)))
    assert torch.autograd.gradcheck(reference.small_matmul, (x, w, bias))


X, W = torch.zeros(3, 8), torch.zeros(4, 8)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ((X[0], W), r"x_MK must have shape \(M, K\), not \(8,\)"),
        ((X, W[:, 1:]), r"w_NK must have shape \(N, 8\), not \(4, 7\)"),
        ((X, W, torch.zeros(3)), r"bias_N must have shape \(4,\), not \(3,\)"),
        ((X, W.double()), "w_NK is torch.float64, but x_MK is torch.float32"),
        ((X, W, torch.zeros(4).half()), "bias_N is torch.float16"),
        ((X, W.to("meta")), "w_NK is on meta, but x_MK is on cpu"),
    ],
)
def test_invalid_arguments_are_refused(given: tuple[Tensor, ...], sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        small_matmul(*given)


def test_triton_refuses_many_rows() -> None:
    with pytest.raises(MachineError, match="at most 16 rows are supported, not 17"):
        small_matmul(torch.zeros(17, 8), W, implementation="triton")


def test_kernels_are_used_for_measured_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tiles.LARGEST_ROWS, (2, 2), 16)
    shape = tiles.shape_of(7, 2048, 4096, 2, 2)
    assert shape == (16, 2048, 4096, 2, 2)
    assert tiles.beats_cublas(shape) and not tiles.beats_cublas(tiles.shape_of(17, 2048, 4096, 2, 2))
    best = tiles.Tiles(16, 32, 64, 2, 3)
    monkeypatch.setattr(tiles, "MEASURED", {shape: best})
    assert tiles.beats_cublas(shape) and tiles.tiles_for(shape) == best
    monkeypatch.setattr(tiles, "MEASURED", {shape: None})
    assert not tiles.beats_cublas(shape) and tiles.tiles_for(shape) == tiles.BLOCK_TILES[2, 2][16]
    assert tiles.tiles_for(tiles.shape_of(1, 2048, 4096, 2, 2)) == tiles.VECTOR_TILES[2]
    assert tiles.tiles_for(tiles.shape_of(1, 2048, 4096, 1, 1)) == tiles.BLOCK_TILES[1, 1][16]


def test_unaligned_rows_use_torch_for_fewer_rows() -> None:
    kept = [rows for rows in (1, 16, 32, 64, 512, 513) if tiles.beats_cublas(tiles.shape_of(rows, 3001, 1999, 2, 1))]
    assert kept == [1, 16, 32]
    kept = [rows for rows in (1, 16, 32, 64, 512, 513) if tiles.beats_cublas(tiles.shape_of(rows, 3001, 2000, 1, 1))]
    assert kept == [1, 16, 32, 64, 512]


def test_splits_cover_all_features() -> None:
    for programs in (1, 5, 60, 200):
        for depth in (1, 511, 512, 2048, 8192, 10_001):
            cut = tiles.cut_depth(programs, depth, 256, 2)
            assert (cut.shares - 1) * cut.share < depth <= cut.shares * cut.share and not cut.share % 256
            assert cut.shares == 1 or cut.shares * programs <= tiles.PROGRAMS

"""Tests the Triton kernels, on a GPU or interpreted on a CPU (as `make test` runs this file).

TRITON_INTERPRET must be set before Triton is imported.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from redline.ops.small_matmul import reference, small_matmul, tiles

triton = pytest.importorskip("redline.ops.small_matmul.triton")
DEVICE = "cpu" if triton.kernel.INTERPRETED else "cuda"
Agrees = Callable[..., None]

pytestmark = pytest.mark.skipif(
    not triton.kernel.INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA device or TRITON_INTERPRET=1"
)
DTYPES = [torch.float32, torch.float16] + ([] if triton.kernel.INTERPRETED else [torch.bfloat16])


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses small tiles, so that small products have several blocks, steps and splits."""
    for size in (2, 4):
        monkeypatch.setitem(tiles.VECTOR_TILES, size, tiles.Tiles(1, 4, 32, 1, 1))
        monkeypatch.setitem(tiles.BLOCK_TILES, (size, size), {16: tiles.Tiles(16, 16, 32, 1, 2)})
    monkeypatch.setattr(tiles, "PROGRAMS", 6)
    monkeypatch.setattr(tiles, "SHORTEST_SPLIT_BYTES", 1)


def inputs(rows: int, columns: int, depth: int) -> list[Tensor]:
    return [torch.randn(rows, depth), torch.randn(columns, depth), torch.randn(columns)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns", "depth"), [(1, 1, 1), (1, 5, 200), (1, 30, 64), (2, 3, 200), (16, 17, 33)])
def test_agrees(agrees: Agrees, rows: int, columns: int, depth: int, dtype: torch.dtype) -> None:
    given = inputs(rows, columns, depth)
    agrees(triton.small_matmul, reference.small_matmul, given, dtype, DEVICE)
    agrees(triton.small_matmul, reference.small_matmul, given[:2], dtype, DEVICE)


def test_features_are_split_for_few_programs() -> None:
    assert tiles.cut_depth(1, 200, 32, 2) == tiles.Cut(4, 64)
    assert tiles.cut_depth(3, 200, 32, 2) == tiles.Cut(2, 128)
    assert tiles.cut_depth(4, 200, 32, 2) == tiles.Cut(1, 224)
    assert tiles.cut_depth(1, 1, 32, 2) == tiles.Cut(1, 32)


@pytest.mark.parametrize("rows", [1, 5])
def test_takes_any_strides(rows: int) -> None:
    x, w, bias = (tensor.to(DEVICE) for tensor in inputs(2 * rows, 40, 90))
    for one, other in ((x[::2, 3:50], w[:, 5:52]), (x[:rows, ::2], w[::2, ::2])):
        expected = reference.small_matmul(one.double(), other.double(), bias[: len(other)].double())
        found = triton.small_matmul(one, other, bias[: len(other)]).double()
        assert (found - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("trained", [0, 1, 2])
def test_only_inputs_that_require_grad_have_gradients(trained: int) -> None:
    given = [tensor.to(DEVICE) for tensor in inputs(3, 5, 40)]
    given[trained].requires_grad_()
    one, other = (function(*given).square().sum() for function in (triton.small_matmul, reference.small_matmul))
    torch.testing.assert_close(
        torch.autograd.grad(one, given[trained]), torch.autograd.grad(other, given[trained]), atol=1e-4, rtol=1e-4
    )


def test_passes_opcheck() -> None:
    x, w, bias = (tensor.to(DEVICE).requires_grad_() for tensor in inputs(2, 5, 40))
    torch.library.opcheck(triton.small_matmul, (x, w, bias))


def test_compiles_without_graph_breaks() -> None:
    x, w, bias = (tensor.to(DEVICE).requires_grad_() for tensor in inputs(2, 5, 40))

    def layer(x: Tensor) -> Tensor:
        return small_matmul(x * 2, w, bias, implementation="triton").sin()

    compiled, eager = torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(x)
    torch.testing.assert_close(compiled, eager)
    torch.testing.assert_close(
        torch.autograd.grad(compiled.sum(), (x, w, bias)), torch.autograd.grad(eager.sum(), (x, w, bias))
    )

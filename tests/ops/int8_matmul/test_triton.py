"""The Triton kernels: on a GPU as they are, elsewhere interpreted (`make test` runs this file so).

Whether Triton interprets is decided when it is imported, by TRITON_INTERPRET.
"""

import pytest
import torch
from torch import Tensor

from redline.ops.int8_matmul import int8_matmul, reference, weight_only_matmul
from redline.ops.small_matmul import tiles

triton = pytest.importorskip("redline.ops.int8_matmul.triton")
DEVICE = "cpu" if triton.INTERPRETED else "cuda"

pytestmark = pytest.mark.skipif(
    not triton.INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA device or TRITON_INTERPRET=1"
)
DTYPES = [torch.float32, torch.float16] + ([] if triton.INTERPRETED else [torch.bfloat16])
# The tensor cores make fp32 products of three parts.
ROUNDINGS = {torch.float32: 128.0, torch.float16: 1.0, torch.bfloat16: 1.0}
SHAPES = [(1, 1, 1), (1, 5, 200), (7, 100, 96), (16, 17, 33), (33, 20, 70), (70, 35, 64)]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small products are several blocks, and their depth several steps and, where few, several shares."""
    monkeypatch.setitem(tiles.VECTOR_TILES, 1, tiles.Tiles(1, 4, 32, 1, 1))
    for sizes in ((1, 1), (2, 1), (4, 1)):
        choices = {16: tiles.Tiles(16, 16, 32, 1, 2), tiles.MANY_ROWS: tiles.Tiles(32, 16, 32, 1, 2)}
        monkeypatch.setitem(tiles.BLOCK_TILES, sizes, choices)
    monkeypatch.setattr(tiles, "PROGRAMS", 6)
    monkeypatch.setattr(tiles, "SHORTEST_SHARE_BYTES", 1)


def whole(*shape: int) -> Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8, device=DEVICE)


def scales(count: int) -> Tensor:
    """Small enough for fp16, which ends at 65,504."""
    return (torch.rand(count, device=DEVICE) + 0.1) / 100


def is_near(found: Tensor, expected: Tensor, roundings: float) -> bool:
    error = (found.double() - expected.double()).norm() / expected.double().norm()
    return bool(error <= roundings * torch.finfo(found.dtype).eps)


@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns", "depth"), SHAPES)
def test_int8_rows_agree(rows: int, columns: int, depth: int, out_dtype: torch.dtype) -> None:
    x, w, bias = whole(rows, depth), whole(columns, depth), torch.randn(columns, device=DEVICE)
    for x_scale in (scales(rows), scales(1), scales(1)[0]):
        for given in ((x, w, x_scale, scales(columns)), (x, w, x_scale, scales(columns), bias)):
            found = triton.int8_matmul(*given, out_dtype=out_dtype)
            assert found.dtype == out_dtype
            assert is_near(found, reference.int8_matmul(*given, out_dtype=torch.float64), 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns", "depth"), SHAPES)
def test_rows_as_they_are_agree(rows: int, columns: int, depth: int, dtype: torch.dtype) -> None:
    x, w, w_scale = torch.randn(rows, depth, device=DEVICE).to(dtype), whole(columns, depth), scales(columns)
    for bias in (None, torch.randn(columns, device=DEVICE).to(dtype)):
        found = triton.weight_only_matmul(x, w, w_scale, bias)
        exact = reference.weight_only_matmul(x.double(), w, w_scale, None if bias is None else bias.double())
        assert found.dtype == dtype and is_near(found, exact, ROUNDINGS[dtype])


def test_the_largest_numbers_do_not_saturate() -> None:
    x, w = torch.full((3, 4096), -128, device=DEVICE).to(torch.int8), torch.full((2, 4096), -128, device=DEVICE)
    one = torch.ones(2, device=DEVICE)
    found = triton.int8_matmul(x, w.to(torch.int8), one[:1], one, out_dtype=torch.float32)
    assert (found == 4096 * 128 * 128).all()


def test_takes_any_strides() -> None:
    x, w, w_scale = whole(10, 90)[::2, 3:50], whole(90, 40).t()[:, 5:52], scales(40)
    x_scale = scales(10)[::2]
    found = triton.int8_matmul(x, w, x_scale, w_scale, out_dtype=torch.float32)
    assert is_near(found, reference.int8_matmul(x, w, x_scale, w_scale, out_dtype=torch.float64), 2)


def test_are_operators_as_torch_wants_them() -> None:
    x, w, w_scale = whole(3, 40), whole(5, 40), scales(5)
    torch.library.opcheck(triton._int8, (x, w, scales(3), w_scale, None, torch.float16))
    torch.library.opcheck(triton._weight_only, (x.float(), w, w_scale, None))


def test_compiles_whole() -> None:
    x, w, w_scale, x_scale = whole(3, 40), whole(5, 40), scales(5), scales(3)

    def layers(x: Tensor) -> Tensor:
        first = int8_matmul(x, w, x_scale, w_scale, out_dtype=torch.float32, implementation="triton")
        return first.sin() + weight_only_matmul(x.float() * 2, w, w_scale, implementation="triton")

    torch.testing.assert_close(torch.compile(layers, fullgraph=True, backend="aot_eager")(x), layers(x))

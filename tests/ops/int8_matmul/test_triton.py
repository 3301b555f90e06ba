"""Tests the Triton kernels, on a GPU or interpreted on a CPU (as `make test` runs this file).

TRITON_INTERPRET must be set before Triton is imported.
"""

import pytest
import torch
from torch import Tensor

from redline.ops.int8_matmul import int8_matmul, reference, weight_only_matmul
from redline.ops.small_matmul import tiles

triton = pytest.importorskip("redline.ops.int8_matmul.triton")
DEVICE = "cpu" if triton.kernel.INTERPRETED else "cuda"

pytestmark = pytest.mark.skipif(
    not triton.kernel.INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA device or TRITON_INTERPRET=1"
)
DTYPES = [torch.float32, torch.float16] + ([] if triton.kernel.INTERPRETED else [torch.bfloat16])
# The int32 sum is converted to fp32 and multiplied by two scales, with half an epsilon of error each.
INT8_ROUNDINGS = 3 * 0.5
# For fp32 sums of floating-point rows; tensor cores use three TF32 products and round sums down.
ROUNDINGS = 128.0
SHAPES = [(1, 1, 1), (1, 5, 200), (7, 50, 96), (16, 17, 33), (33, 20, 70), (70, 35, 64)]
# One row, few rows and many rows use different kernels or tiles.
HALF = [(*shape, dtype) for shape in ((1, 5, 200), (7, 20, 40), (33, 20, 70)) for dtype in DTYPES[1:]]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses small tiles, so that small products have several blocks, steps and splits."""
    monkeypatch.setitem(tiles.VECTOR_TILES, 1, tiles.Tiles(1, 4, 32, 1, 1))
    for sizes in ((1, 1), (2, 1), (4, 1)):
        choices = {16: tiles.Tiles(16, 16, 32, 1, 2), tiles.MANY_ROWS: tiles.Tiles(32, 16, 32, 1, 2)}
        monkeypatch.setitem(tiles.BLOCK_TILES, sizes, choices)
    monkeypatch.setattr(tiles, "PROGRAMS", 6)
    monkeypatch.setattr(tiles, "SHORTEST_SPLIT_BYTES", 1)


def whole(*shape: int) -> Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8, device=DEVICE)


def scales(count: int) -> Tensor:
    """Returns scales that keep the result below 65,504, the largest fp16 value."""
    return (torch.rand(count, device=DEVICE) + 0.1) / 100


def is_near(found: Tensor, exact: Tensor, size: Tensor, roundings: float) -> bool:
    """Allows, per element, this many fp32 roundings of the product, one of the bias, and one to the output dtype.

    `size` is the magnitude of the product before the bias, which determines the rounding error if the bias cancels it.
    """
    single, own = torch.finfo(torch.float32), torch.finfo(found.dtype)
    limit = roundings * single.eps * size + 0.5 * single.eps * exact.abs()
    if found.dtype != torch.float32:
        limit = limit + 0.5 * own.eps * exact.abs().clamp_min(own.smallest_normal)
    return bool(((found.double() - exact).abs() <= 1.001 * limit).all())


@pytest.mark.parametrize(("rows", "columns", "depth", "out_dtype"), [*((*shape, DTYPES[0]) for shape in SHAPES), *HALF])
def test_int8_rows_agree(rows: int, columns: int, depth: int, out_dtype: torch.dtype) -> None:
    x, w, bias = whole(rows, depth), whole(columns, depth), torch.randn(columns, device=DEVICE)
    for x_scale, *rest in ((scales(rows), bias), (scales(1),), (scales(1)[0], bias)):
        given = (x, w, x_scale, scales(columns), *rest)
        found = triton.int8_matmul(*given, out_dtype=out_dtype)
        exact, size = exact_int8(*given)
        assert found.dtype == out_dtype and is_near(found, exact, size, INT8_ROUNDINGS)


def exact_int8(*given: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the exact result, and the magnitude of the product before the bias."""
    result, product = (reference.int8_matmul(*part, out_dtype=torch.float64) for part in (given, given[:4]))
    return result, product.abs()


def test_a_bias_may_cancel_the_product() -> None:
    """The result is small, but has the rounding error of the large product."""
    x, w = (torch.tensor([[value]], dtype=torch.int8, device=DEVICE) for value in (66, 111))
    x_scale, w_scale = (torch.tensor([value], device=DEVICE) for value in (0.0073, 0.0071))
    product = reference.int8_matmul(x, w, x_scale, w_scale, out_dtype=torch.float64)
    for share in torch.linspace(-1.1, -0.9, 21).tolist():
        given = (x, w, x_scale, w_scale, (share * product[0]).float())
        exact, size = exact_int8(*given)
        found = triton.int8_matmul(*given, out_dtype=torch.float32)
        assert is_near(found, exact, size, INT8_ROUNDINGS)
        assert not is_near(found + 4e-7 * product, exact, size, INT8_ROUNDINGS)


@pytest.mark.parametrize(("rows", "columns", "depth", "dtype"), [*((*shape, DTYPES[0]) for shape in SHAPES), *HALF])
def test_floating_point_rows_agree(rows: int, columns: int, depth: int, dtype: torch.dtype) -> None:
    x, w, w_scale = torch.randn(rows, depth, device=DEVICE).to(dtype), whole(columns, depth), scales(columns)
    for bias in (None, torch.randn(columns, device=DEVICE).to(dtype)):
        found = triton.weight_only_matmul(x, w, w_scale, bias)
        exact = reference.weight_only_matmul(x.double(), w, w_scale, None if bias is None else bias.double())
        size = reference.weight_only_matmul(x.double().abs(), w.double().abs(), w_scale)
        assert found.dtype == dtype and is_near(found, exact, size, ROUNDINGS)


def test_the_largest_numbers_do_not_saturate() -> None:
    x, w = torch.full((3, 4096), -128, device=DEVICE).to(torch.int8), torch.full((2, 4096), -128, device=DEVICE)
    one = torch.ones(2, device=DEVICE)
    found = triton.int8_matmul(x, w.to(torch.int8), one[:1], one, out_dtype=torch.float32)
    assert (found == 4096 * 128 * 128).all()


def test_takes_any_strides() -> None:
    x, w, w_scale = whole(10, 90)[::2, 3:50], whole(90, 40).t()[:, 5:52], scales(40)
    x_scale = scales(10)[::2]
    found = triton.int8_matmul(x, w, x_scale, w_scale, out_dtype=torch.float32)
    assert is_near(found, *exact_int8(x, w, x_scale, w_scale), INT8_ROUNDINGS)


def test_pass_opcheck() -> None:
    x, w, w_scale = whole(3, 40), whole(5, 40), scales(5)
    torch.library.opcheck(triton.int8_matmul, (x, w, scales(3), w_scale, None, torch.float16))
    torch.library.opcheck(triton.weight_only_matmul, (x.float(), w, w_scale, None))


def test_compiles_without_graph_breaks() -> None:
    x, w, w_scale, x_scale = whole(3, 40), whole(5, 40), scales(5), scales(3)

    def layers(x: Tensor) -> Tensor:
        first = int8_matmul(x, w, x_scale, w_scale, out_dtype=torch.float32, implementation="triton")
        return first.sin() + weight_only_matmul(x.float() * 2, w, w_scale, implementation="triton")

    torch.testing.assert_close(torch.compile(layers, fullgraph=True, backend="aot_eager")(x), layers(x))

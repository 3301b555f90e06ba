"""Tests the references of the int8 ops, torch._int_mm, and which arguments are refused."""

import pytest
import torch
from torch import Tensor

from redline.errors import MachineError, ModelError
from redline.ops.int8_matmul import int8_matmul, int_mm, reference, weight_only_matmul

pytestmark = pytest.mark.cpu


def whole(*shape: int) -> Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8)


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scales_of_rows", [(), (1,), (5,)])
def test_agrees_with_integer_sums(out_dtype: torch.dtype, scales_of_rows: tuple[int, ...]) -> None:
    x, w, bias = whole(5, 70), whole(9, 70), torch.randn(9)
    x_scale, w_scale = torch.rand(scales_of_rows) / 100, torch.rand(9) / 100
    sums = (x.long()[:, None] * w.long()).sum(2)
    expected = (sums * x_scale.expand(5)[:, None] * w_scale + bias).to(out_dtype)
    limit = 2 * torch.finfo(out_dtype).eps
    is_exact = int_mm.products_are_exact(x.device)
    if not is_exact:
        with pytest.raises(MachineError, match="saturates at 16 bits"):
            int8_matmul(x, w, x_scale, w_scale, bias, out_dtype=out_dtype, implementation="int_mm")
    for implementation in ("auto", "reference", "int_mm") if is_exact else ("auto", "reference"):
        found = int8_matmul(x, w, x_scale, w_scale, bias, out_dtype=out_dtype, implementation=implementation)
        torch.testing.assert_close(found, expected, atol=limit, rtol=limit)


def test_weight_only_matmul_agrees_with_a_float_product() -> None:
    x, w, w_scale, bias = torch.randn(5, 70), whole(9, 70), torch.rand(9), torch.randn(9)
    expected = x.double() @ (w.double() * w_scale[:, None]).t() + bias
    torch.testing.assert_close(weight_only_matmul(x, w, w_scale, bias).double(), expected, atol=1e-2, rtol=1e-5)
    exact = weight_only_matmul(x.double(), w, w_scale, bias.double())
    torch.testing.assert_close(exact, expected)
    assert weight_only_matmul(x.bfloat16(), w, w_scale).dtype == torch.bfloat16


X, W, SCALE = whole(3, 8), whole(4, 8), torch.ones(4)


@pytest.mark.parametrize(
    ("given", "options", "sentence"),
    [
        ((X[0], W, SCALE[0], SCALE), {}, r"x_MK must have shape \(M, K\), not \(8,\)"),
        ((X[:, :7], W, SCALE[0], SCALE), {}, r"w_NK must have shape \(N, 7\), not \(4, 8\)"),
        ((X.float(), W, SCALE[0], SCALE), {}, "x_MK must be int8, not torch.float32"),
        ((X, W.int(), SCALE[0], SCALE), {}, "w_NK must be int8, not torch.int32"),
        ((X, W, SCALE[:2], SCALE), {}, r"x_scale must be one float32 number or \(3,\) float32, not \(2,\)"),
        ((X, W, SCALE[0].double(), SCALE), {}, "torch.float64"),
        ((X, W, SCALE[0], SCALE[:3]), {}, r"w_scale_N must have shape \(4,\), not \(3,\)"),
        ((X, W, SCALE[0], SCALE.half()), {}, "torch.float16"),
        ((X, W, SCALE[0], SCALE, SCALE[:3]), {}, r"bias_N must have shape \(4,\)"),
        ((X, W.to("meta"), SCALE[0], SCALE), {}, "w_NK is on meta"),
        (
            (X, W, SCALE[0], SCALE),
            {"out_dtype": torch.int32},
            "out_dtype must be float16, bfloat16 or float32, not torch.int32",
        ),
        (
            (X, W, SCALE[0], SCALE),
            {"implementation": "cuda"},
            "unknown implementation 'cuda' .supported: auto, reference, int_mm, triton",
        ),
        ((whole(1, 2**17), whole(1, 2**17), SCALE[0], SCALE[:1]), {}, "int32 sums could overflow"),
        ((X, W, SCALE[0], SCALE.clone().requires_grad_()), {}, "has no gradient"),
    ],
)
def test_invalid_arguments_are_refused(given: tuple[Tensor, ...], options: dict[str, object], sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        int8_matmul(*given, **options)


def test_weight_only_matmul_refuses_invalid_arguments() -> None:
    with pytest.raises(ModelError, match="x_MK must be floating-point, not torch.int8"):
        weight_only_matmul(X, W, SCALE)
    with pytest.raises(ModelError, match="has no gradient"):
        weight_only_matmul(X.float().requires_grad_(), W, SCALE)
    with torch.no_grad():
        weight_only_matmul(X.float().requires_grad_(), W, SCALE)


def test_auto_avoids_shapes_that_int_mm_refuses() -> None:
    assert bool(int_mm.why_not(X, W)) != int_mm.products_are_exact(X.device)

    class OnCuda:
        is_cuda = True

        def __init__(self, *shape: int) -> None:
            self.shape = shape

    assert "more than 16 rows, not 16" in int_mm.why_not(OnCuda(16, 64), OnCuda(64, 64))
    assert "multiples of 8, not 63 and 64" in int_mm.why_not(OnCuda(17, 63), OnCuda(64, 63))
    assert "multiples of 8, not 64 and 65" in int_mm.why_not(OnCuda(17, 64), OnCuda(65, 64))
    assert not int_mm.why_not(OnCuda(17, 64), OnCuda(64, 64))


def test_the_reference_rounds_once() -> None:
    x, w = whole(4, 50), whole(6, 50)
    exact = reference.int8_matmul(x, w, SCALE[:1] / 3, torch.ones(6) / 7, out_dtype=torch.float64)
    assert torch.equal(reference.int8_matmul(x, w, SCALE[:1] / 3, torch.ones(6) / 7), exact.to(torch.bfloat16))


def test_the_largest_depth_fits_int32_sums() -> None:
    depth = 2**17 - 1
    deepest = torch.full((1, depth), -128, dtype=torch.int8)
    found = int8_matmul(deepest, deepest, torch.ones(()), torch.ones(1), out_dtype=torch.float32)
    assert found.item() == float(torch.tensor(128 * 128 * depth, dtype=torch.float32))

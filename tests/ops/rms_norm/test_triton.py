"""Tests the Triton kernels of RMSNorm, on a GPU or interpreted on a CPU."""

from collections.abc import Callable

import pytest
import torch

from redline.errors import MachineError
from redline.ops.rms_norm import add_rms_norm, reference, rms_norm

triton = pytest.importorskip("redline.ops.rms_norm.triton")
DEVICE = "cpu" if triton.kernel.INTERPRETED else "cuda"
Agrees = Callable[..., None]

pytestmark = pytest.mark.skipif(
    not triton.kernel.INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA device or TRITON_INTERPRET=1"
)
EPS = 1e-5


@pytest.fixture(autouse=True)
def wide_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses large tiles for the sums, because every program takes long when interpreted."""
    if triton.kernel.INTERPRETED:
        monkeypatch.setattr(triton, "SUM_TILES", triton.SumTiles(512, 1024, 8))


def norm(*inputs: torch.Tensor) -> torch.Tensor:
    return triton.rms_norm(*inputs, EPS)


def add(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return triton.add_rms_norm(*inputs, EPS)


SHAPES = [(5, 3), (3, 5, 37), (301, 64), (17, 768), (2, 4096), (1, 4096), (3, 5000)]


@pytest.mark.parametrize(
    ("shape", "dtype"), [*((shape, torch.float32) for shape in SHAPES), ((3, 5, 37), torch.float16)]
)
def test_agrees(agrees: Agrees, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    inputs = torch.randn(shape) * 3, torch.randn(shape[-1])
    agrees(norm, lambda *exact: reference.rms_norm(*exact, EPS), inputs, dtype, DEVICE)


@pytest.mark.parametrize("shape", [(2, 3, 37), (130, 100), (3, 2050), (1, 2050)])
def test_agrees_with_a_residual(agrees: Agrees, shape: tuple[int, ...]) -> None:
    inputs = torch.randn(shape), torch.randn(shape), torch.randn(shape[-1])
    agrees(add, lambda *exact: reference.add_rms_norm(*exact, EPS), inputs, torch.float32, DEVICE)


def test_the_sum_is_rounded_before_normalization() -> None:
    x, residual = (torch.randn(9, 70, device=DEVICE).half() for _ in range(2))
    weight = torch.randn(70, device=DEVICE)
    normed, total = add_rms_norm(x, residual, weight, EPS, "triton")
    assert torch.equal(total, x + residual)
    exact = reference.rms_norm(total.double(), weight.double(), EPS)
    assert normed.dtype == torch.float16
    assert ((normed.double() - exact).abs() <= 0.501 * torch.finfo(torch.float16).eps * exact.abs() + 1e-7).all()


def test_many_partial_sums_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "SUM_TILES", triton.SumTiles(32, 16, 1))
    for programs, width in ((1, 3), (32, 16), (77, 50)):
        partial = torch.randn(programs, width, device=DEVICE)
        found = torch.full((width + 1,), 7.0, device=DEVICE, dtype=torch.float16)
        triton._launch_sum(partial, found[:-1])
        exact = partial.double().sum(0)
        assert ((found[:-1].double() - exact).abs() <= 1e-3 * partial.abs().sum(0)).all() and found[-1] == 7


def test_either_output_alone_gives_gradients() -> None:
    x, residual = (torch.randn(4, 20, device=DEVICE, requires_grad=True) for _ in range(2))
    weight, grad = torch.randn(20, device=DEVICE, requires_grad=True), torch.randn(4, 20, device=DEVICE)
    for index, inputs in ((0, (x, residual, weight)), (1, (x, residual))):
        found = torch.autograd.grad(add(x, residual, weight)[index], inputs, grad)
        expected = torch.autograd.grad(reference.add_rms_norm(x, residual, weight, EPS)[index], inputs, grad)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_takes_any_strides_and_a_weight_of_another_dtype() -> None:
    x = torch.randn(30, 6, 4, device=DEVICE).half().permute(2, 1, 0).requires_grad_()
    weight = torch.randn(60, device=DEVICE)[::2].requires_grad_()
    out = norm(x, weight)
    grads = torch.autograd.grad(out.float().sum(), (x, weight))  # whose gradient has strides of zero
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, weight)]
    expected = reference.rms_norm(*exact, EPS)
    assert out.dtype == torch.float16 and [grad.dtype for grad in grads] == [torch.float16, torch.float32]
    for one, other in zip((out, *grads), (expected, *torch.autograd.grad(expected.sum(), exact)), strict=True):
        assert (one.double() - other).norm() <= 2e-3 * other.norm()


def test_pass_opcheck() -> None:
    x, residual = (torch.randn(3, 6, device=DEVICE, requires_grad=True) for _ in range(2))
    weight = torch.randn(6, device=DEVICE, requires_grad=True)
    torch.library.opcheck(triton.rms_norm, (x, weight, EPS))
    torch.library.opcheck(triton.add_rms_norm, (x, residual, weight, EPS))


def test_compiles_without_graph_breaks(compiled_agrees: Callable[..., None]) -> None:
    def block(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        normed, total = add_rms_norm(x + 1, residual, weight, EPS, "triton")
        return rms_norm(normed.sin(), weight, EPS, "triton"), total * 2

    inputs = [torch.randn(shape, device=DEVICE, requires_grad=True) for shape in ((5, 24), (5, 24), (24,))]
    compiled_agrees(block, inputs)


@pytest.mark.parametrize(
    ("x", "sentence"),
    [
        (torch.zeros(1, 4, dtype=torch.float64), "unsupported dtype float64 .*float32."),
        (torch.zeros(0, 4), "the input is empty"),
        (torch.zeros(1, 65537), "rows may have at most 65536 elements, not 65537"),
    ],
)
def test_unsupported_inputs_are_refused(x: torch.Tensor, sentence: str) -> None:
    with pytest.raises(MachineError, match=f"{sentence}.$"):
        rms_norm(x.to(DEVICE), torch.ones(x.shape[-1], device=DEVICE), implementation="triton")

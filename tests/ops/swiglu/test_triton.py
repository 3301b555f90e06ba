"""Tests the Triton kernels of SwiGLU, on a GPU or interpreted on a CPU."""

from collections.abc import Callable

import pytest
import torch

from redline.errors import MachineError
from redline.ops.swiglu import packed_swiglu, reference, swiglu

triton = pytest.importorskip("redline.ops.swiglu.triton")
DEVICE = "cpu" if triton.kernel.INTERPRETED else "cuda"
Agrees = Callable[..., None]

pytestmark = pytest.mark.skipif(
    not triton.kernel.INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA device or TRITON_INTERPRET=1"
)


def in_both_dtypes(*shapes: tuple[int, ...]) -> pytest.MarkDecorator:
    """Returns each shape in fp32, and the last in fp16 too."""
    cases = [*((shape, torch.float32) for shape in shapes), (shapes[-1], torch.float16)]
    return pytest.mark.parametrize(("shape", "dtype"), cases)


@in_both_dtypes((1,), (2, 3, 37), (3, 1100), (2, 2100))
def test_agrees(agrees: Agrees, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    agrees(triton.swiglu, reference.swiglu, (torch.randn(shape) * 3, torch.randn(shape)), dtype, DEVICE)


@pytest.mark.parametrize("shape", [(3, 4, 26), (2, 4200)])
def test_agrees_on_halves_of_one_tensor(agrees: Agrees, shape: tuple[int, ...]) -> None:
    def of_halves(swiglu: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda x: swiglu(*x.chunk(2, -1))

    agrees(of_halves(triton.swiglu), of_halves(reference.swiglu), (torch.randn(shape),), torch.float32, DEVICE)


@in_both_dtypes((2,), (1, 26), (3, 2, 26), (3, 5, 2), (2, 4200))
def test_agrees_on_a_packed_tensor(agrees: Agrees, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    agrees(triton.packed_swiglu, reference.packed_swiglu, (torch.randn(shape) * 3,), dtype, DEVICE)


def test_a_packed_tensor_of_any_strides_has_a_contiguous_gradient() -> None:
    whole = torch.randn(3, 10, 6, device=DEVICE)
    for gate_up in (whole.transpose(1, 2), whole[:, 3:9], whole[::2, :, 1:5], whole[:, :1].expand(3, 4, 6)):
        gate_up = gate_up.detach().requires_grad_()
        out, expected = packed_swiglu(gate_up, "triton"), reference.packed_swiglu(gate_up)
        torch.testing.assert_close(out, expected)
        grad = torch.randn_like(out).transpose(0, 1).contiguous().transpose(0, 1)
        (found,) = torch.autograd.grad(out, gate_up, grad)
        torch.testing.assert_close(found, *torch.autograd.grad(expected, gate_up, grad))
        assert found.is_contiguous()


def test_halves_are_read_in_place() -> None:
    gate, up = torch.randn(3, 4, 26, device=DEVICE).chunk(2, -1)
    for half in (gate, up):
        assert triton._rows(half).untyped_storage().data_ptr() == gate.untyped_storage().data_ptr()


def test_takes_any_strides() -> None:
    gate = torch.randn(4, 3, 5, device=DEVICE).transpose(0, 2).requires_grad_()
    up = torch.randn(5, 1, 4, device=DEVICE).expand(5, 3, 4).requires_grad_()
    out = swiglu(gate, up, "triton")
    expected = reference.swiglu(gate, up)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(
        torch.autograd.grad(out.sum(), (gate, up)), torch.autograd.grad(expected.sum(), (gate, up))
    )


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_large_gates_stay_finite() -> None:
    gate = torch.tensor([-1e4, -100.0, 100.0, 1e4], device=DEVICE, requires_grad=True)
    out = swiglu(gate, torch.ones_like(gate), "triton")
    (slope,) = torch.autograd.grad(out.sum(), gate)
    torch.testing.assert_close(out.cpu(), torch.tensor([0.0, 0.0, 100.0, 1e4]))
    torch.testing.assert_close(slope.cpu(), torch.tensor([0.0, 0.0, 1.0, 1.0]))


def test_passes_opcheck() -> None:
    gate, up = (torch.randn(3, 6, device=DEVICE, requires_grad=True) for _ in range(2))
    torch.library.opcheck(triton.swiglu, (gate, up))
    torch.library.opcheck(triton.packed_swiglu, (gate,))


def test_compiles_without_graph_breaks(compiled_agrees: Callable[..., None]) -> None:
    def block(x: torch.Tensor) -> torch.Tensor:
        return swiglu(*(x + 1).chunk(2, -1), "triton").sin()

    def packed_block(x: torch.Tensor) -> torch.Tensor:
        return packed_swiglu(x + 1, "triton").sin()

    for function in (block, packed_block):
        compiled_agrees(function, [torch.randn(2, 2, 14, device=DEVICE, requires_grad=True)])


@pytest.mark.parametrize(
    ("gate", "sentence"),
    [
        (torch.zeros(4, dtype=torch.float64), "unsupported dtype float64 .*float32."),
        (torch.zeros(0, 4), "the input is empty"),
    ],
)
def test_unsupported_inputs_are_refused(gate: torch.Tensor, sentence: str) -> None:
    with pytest.raises(MachineError, match=f"{sentence}.$"):
        swiglu(gate.to(DEVICE), gate.to(DEVICE), "triton")
    with pytest.raises(MachineError, match=f"{sentence}.$"):
        packed_swiglu(gate.to(DEVICE), "triton")

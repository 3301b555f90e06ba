"""Tests the Triton kernels of LayerNorm, dropout and ReLU, on a GPU or interpreted on a CPU."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from redline.errors import MachineError
from redline.ops.layer_norm_dropout_relu import layer_norm_dropout_relu, reference

triton = pytest.importorskip("redline.ops.layer_norm_dropout_relu.triton")
DEVICE = "cpu" if triton.kernel.INTERPRETED else "cuda"
Agrees = Callable[..., None]
Inputs = Callable[..., tuple[Tensor, Tensor, Tensor]]

pytestmark = pytest.mark.skipif(
    not triton.kernel.INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA device or TRITON_INTERPRET=1"
)
EPS = 1e-5


@pytest.mark.parametrize(
    ("rows", "width", "p", "dtype"),
    [
        *((*sizes, 0.3, torch.float32) for sizes in ((3, 10), (7, 37), (203, 64), (5, 1000), (2, 4100))),
        (7, 37, 0.0, torch.float32),
        (45, 64, 0.3, torch.float16),
    ],
)
def test_agrees(agrees: Agrees, inputs: Inputs, rows: int, width: int, p: float, dtype: torch.dtype) -> None:
    seed = torch.randint(2**63 - 1, (), device=DEVICE)
    agrees(
        lambda *given: triton.layer_norm_dropout_relu(*given, p, EPS, seed),
        lambda *exact: reference.layer_norm_dropout_relu(*exact, p, EPS, seed),
        inputs(rows, width, dtype),
        dtype,
        DEVICE,
    )


@pytest.mark.parametrize("p", [1e-3, 0.5, 0.999])
def test_drops_the_same_elements_as_the_reference(p: float) -> None:
    x, weight, bias = (
        torch.randn(33, 130, device=DEVICE),
        torch.zeros(130, device=DEVICE),
        torch.ones(130, device=DEVICE),
    )
    for seed in (0, 2**32 - 1, 2**63 - 1):
        found, expected = (
            layer_norm_dropout_relu(x, weight, bias, p, seed=seed, implementation=name)
            for name in ("triton", "reference")
        )
        assert torch.equal(found > 0, expected > 0)


def test_takes_any_strides_and_parameters_of_another_dtype(inputs: Inputs) -> None:
    x, weight, bias = (tensor.to(DEVICE) for tensor in inputs(12, 30, torch.float16))
    x = x.t().contiguous().t().reshape(3, 4, 30).requires_grad_()
    weight, bias = weight.float().requires_grad_(), bias.float().requires_grad_()
    out = layer_norm_dropout_relu(x, weight, bias, 0.2, seed=9, implementation="triton")
    grads = torch.autograd.grad(out.float().sum(), (x, weight, bias))
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, weight, bias)]
    expected = layer_norm_dropout_relu(*exact, 0.2, seed=9, implementation="reference")
    for one, other in zip((out, *grads), (expected, *torch.autograd.grad(expected.sum(), exact)), strict=True):
        assert (one.double() - other).norm() <= 2e-3 * other.norm()


def test_nan_propagates() -> None:
    x = torch.randn(2, 8, device=DEVICE)
    x[1, 3] = torch.nan
    out = layer_norm_dropout_relu(
        x, torch.ones(8, device=DEVICE), torch.zeros(8, device=DEVICE), implementation="triton"
    )
    assert out[0].isfinite().all() and out[1].isnan().all()


def test_passes_opcheck(inputs: Inputs) -> None:
    given = [tensor.to(DEVICE).requires_grad_() for tensor in inputs(3, 6)]
    torch.library.opcheck(triton.layer_norm_dropout_relu, (*given, 0.25, EPS, torch.tensor(3, device=DEVICE)))


def test_compiles_without_graph_breaks(compiled_agrees: Callable[..., None], inputs: Inputs) -> None:
    def block(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return layer_norm_dropout_relu(x, weight, bias, 0.25, seed=4, implementation="triton").sin()

    compiled_agrees(block, [tensor.to(DEVICE).requires_grad_() for tensor in inputs(5, 24)])


@pytest.mark.parametrize("compiled", [False, True])
def test_backward_uses_the_mask_of_forward_without_a_seed(compiled: bool) -> None:
    x, weight = torch.randn(30, 50, device=DEVICE), torch.zeros(50, device=DEVICE)
    bias = torch.ones(50, device=DEVICE, requires_grad=True)

    def layer(bias: Tensor) -> Tensor:
        return layer_norm_dropout_relu(x, weight, bias, 0.5, implementation="triton")

    run = torch.compile(layer, fullgraph=True, backend="inductor" if DEVICE == "cuda" else "aot_eager")
    first, second = (run(bias) if compiled else layer(bias) for _ in range(2))
    assert not torch.equal(first, second)
    for out in (first, second):
        # Each kept element is 2, and changes twice as much as the bias.
        assert torch.equal(torch.autograd.grad(out.sum(), bias)[0], out.detach().sum(0))


@pytest.mark.parametrize(
    ("x", "sentence"),
    [
        (torch.zeros(1, 4, dtype=torch.float64), "unsupported dtype float64 .*float32."),
        (torch.zeros(0, 4), "the input is empty"),
        (torch.zeros(1, 65537), "rows may have at most 65536 elements, not 65537"),
    ],
)
def test_unsupported_inputs_are_refused(x: Tensor, sentence: str) -> None:
    weight = torch.ones(x.shape[-1], device=DEVICE)
    with pytest.raises(MachineError, match=f"{sentence}.$"):
        layer_norm_dropout_relu(x.to(DEVICE), weight, weight, implementation="triton")

"""Tests the Triton kernels, on a GPU or interpreted on a CPU (as `make test` runs this file).

TRITON_INTERPRET must be set before Triton is imported.
"""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from redline.ops.linear_cross_entropy import linear_cross_entropy, reference

triton = pytest.importorskip("redline.ops.linear_cross_entropy.triton")
chunks = pytest.importorskip("redline.ops.linear_cross_entropy.chunks")
cross_entropy_triton = pytest.importorskip("redline.ops.cross_entropy.triton")
DEVICE = "cpu" if triton.kernel.INTERPRETED else "cuda"
Agrees = Callable[..., None]

pytestmark = [
    pytest.mark.skipif(
        not triton.kernel.INTERPRETED and not torch.cuda.is_available(),
        reason="needs a CUDA device or TRITON_INTERPRET=1",
    ),
    # The interpreter uses numpy, which warns of the intentional infinities and NaN of the kernels.
    pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning"),
]
DTYPES = [torch.float32, torch.float16] + ([] if triton.kernel.INTERPRETED else [torch.bfloat16])
# The logits and their gradients are rounded to the dtype.
ROUNDINGS = {torch.float16: 4, torch.bfloat16: 4}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses small chunks, so that a few rows make several and the last one is partial."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 1)
    monkeypatch.setattr(chunks, "_ALIGNMENT", 4)


def inputs(rows: int, features: int, classes: int) -> list[Tensor]:
    hidden, weight = torch.randn(rows, features), torch.randn(classes, features) * 0.5
    return [hidden, weight, torch.randint(classes, (rows,)), torch.randn(classes)]


def both(**options: object) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    return partial(triton.linear_cross_entropy, **options), partial(reference.linear_cross_entropy, **options)


@pytest.mark.parametrize(
    ("rows", "features", "classes", "dtype"),
    [(1, 8, 7, DTYPES[0]), (13, 5, 33, DTYPES[0]), *((10, 12, 65, dtype) for dtype in DTYPES[1:])],
)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_agrees(agrees: Agrees, rows: int, features: int, classes: int, reduction: str, dtype: torch.dtype) -> None:
    given = inputs(rows, features, classes)[:3]
    agrees(*both(reduction=reduction), given, dtype, DEVICE, ROUNDINGS.get(dtype))


@pytest.mark.parametrize(
    ("reduction", "dtype"), [("mean", DTYPES[0]), ("sum", DTYPES[-1]), *(("none", dtype) for dtype in DTYPES)]
)
def test_agrees_with_all_options(agrees: Agrees, reduction: str, dtype: torch.dtype) -> None:
    given = inputs(11, 6, 37)
    given[2][3:6] = -1
    options = {"ignore_index": -1, "label_smoothing": 0.1, "z_loss": 0.01, "reduction": reduction}
    agrees(*both(**options), given, dtype, DEVICE, ROUNDINGS.get(dtype))


def test_a_loss_scale_scales_the_gradients(agrees: Agrees) -> None:
    def tenfold(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *given: 10 * function(*given) ** 2

    one, other = both(z_loss=0.01)
    agrees(tenfold(one), tenfold(other), inputs(11, 6, 37), torch.float32, DEVICE)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("trained", [(0,), (1,), (3,), (0, 3), (1, 3)])
def test_only_inputs_that_require_grad_have_gradients(trained: tuple[int, ...], reduction: str) -> None:
    given = [tensor.to(DEVICE) for tensor in inputs(9, 6, 21)]
    for index in trained:
        given[index].requires_grad_()
    one, other = (function(*given).square().sum() for function in both(reduction=reduction))
    parameters = [given[index] for index in trained]
    torch.testing.assert_close(
        torch.autograd.grad(one, parameters), torch.autograd.grad(other, parameters), atol=1e-5, rtol=1e-4
    )
    (one,) = torch.autograd.grad(linear_cross_entropy(*given, implementation="triton"), parameters[:1])
    assert one.isfinite().all()


def test_inference_computes_no_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    def unwanted(*_: object) -> None:
        raise AssertionError("a gradient was made")

    monkeypatch.setattr(chunks, "write_gradient", unwanted)
    given = [tensor.to(DEVICE) for tensor in inputs(9, 6, 21)]
    one, other = (function(*given) for function in both())
    torch.testing.assert_close(one, other)
    given[1].requires_grad_()
    with torch.no_grad():
        assert not triton.linear_cross_entropy(*given).requires_grad
    with pytest.raises(AssertionError, match="was made"):
        triton.linear_cross_entropy(*given)


def test_the_weight_may_be_tied_to_the_embedding() -> None:
    weight = torch.randn(19, 6, device=DEVICE, requires_grad=True)
    tokens, target = torch.randint(19, (9,), device=DEVICE), torch.randint(19, (9,), device=DEVICE)
    one, other = (torch.autograd.grad(function(weight[tokens], weight, target), weight) for function in both())
    torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)


def test_backward_may_run_twice() -> None:
    """The first backward must not scale the gradients in place."""
    hidden, weight, target, _ = (tensor.to(DEVICE) for tensor in inputs(9, 6, 21))
    loss = triton.linear_cross_entropy(hidden, weight.requires_grad_(), target)
    (first,) = torch.autograd.grad(loss, weight, torch.tensor(3.0, device=DEVICE), retain_graph=True)
    kept = first.clone()
    (second,) = torch.autograd.grad(loss, weight, torch.tensor(3.0, device=DEVICE))
    torch.testing.assert_close(first, second, atol=0, rtol=0)
    assert torch.equal(first, kept)


@pytest.mark.parametrize("grad", [1.0, 3.0])
def test_gradients_accumulate_over_losses(grad: float) -> None:
    hidden, weight, target, _ = (tensor.to(DEVICE) for tensor in inputs(9, 6, 21))
    of_each = []
    for function in both():
        trained = weight.clone().requires_grad_()
        for rows in (slice(0, 4), slice(4, 9)):
            (grad * function(hidden[rows], trained, target[rows])).backward()
        of_each.append(trained.grad)
    torch.testing.assert_close(*of_each, atol=1e-5, rtol=1e-4)


def test_the_last_backward_copies_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "_scaled", lambda *_: pytest.fail("a copy was made"))
    hidden, weight, target, _ = (tensor.to(DEVICE) for tensor in inputs(9, 6, 21))
    triton.linear_cross_entropy(hidden, weight.requires_grad_(), target).backward()
    assert weight.grad is not None and weight.grad.abs().sum() > 0


def test_gradients_have_no_autograd_history() -> None:
    x, weight = (torch.randn(*shape, device=DEVICE, requires_grad=True) for shape in ((5, 8), (11, 8)))
    loss = triton.linear_cross_entropy(x, weight, torch.randint(11, (5,), device=DEVICE))
    assert not any(one.requires_grad for one in torch.autograd.grad(loss, (x, weight)))


def test_only_ignored_rows_give_zero() -> None:
    hidden, weight, target, _ = (tensor.to(DEVICE) for tensor in inputs(9, 6, 21))
    loss = triton.linear_cross_entropy(hidden, weight.requires_grad_(), torch.full_like(target, -100))
    assert loss.item() == 0.0 and not torch.autograd.grad(loss, weight)[0].any()


def test_many_chunks_keep_the_precision_of_the_weight_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half precision rounds the gradients of logits, but not their sum, so 16 chunks are as accurate as 1."""
    dtype = DTYPES[-1]
    given = inputs(64, 8, 24)
    hidden, weight, target = (tensor.to(DEVICE) for tensor in given[:3])
    hidden, weight = hidden.to(dtype), weight.to(dtype).requires_grad_()
    exact = weight.detach().double().requires_grad_()
    loss = reference.linear_cross_entropy(hidden.double(), exact, target)
    (expected,) = torch.autograd.grad(loss, exact)
    errors = []
    for limit, sums in ((1, torch.float32), (2**30, torch.float32), (1, dtype)):
        monkeypatch.setattr(chunks, "CHUNK_BYTES", limit)
        monkeypatch.setattr(chunks, "SUM_DTYPE", sums)
        (found,) = torch.autograd.grad(triton.linear_cross_entropy(hidden, weight, target), weight)
        errors.append(((found.double() - expected).norm() / expected.norm()).item())
    assert errors[0] <= 1.05 * errors[1] and errors[1] <= 2 * torch.finfo(dtype).eps, errors
    assert errors[2] > 1.2 * errors[0], "sums in half precision would do"


def test_chunks_are_even_and_within_the_memory_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "_ALIGNMENT", 128)
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 2**30)
    assert chunks.rows_of_a_chunk(8192, 128_256, 2) == 4096
    assert chunks.rows_of_a_chunk(8193, 128_256, 2) == 2816
    assert chunks.rows_of_a_chunk(5, 128_256, 2) == 128
    assert chunks.rows_of_a_chunk(10**6, 2**30, 4) == 128
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 2**31)
    assert chunks.rows_of_a_chunk(8192, 128_256, 2) == 8192
    assert chunks.rows_of_a_chunk(8320, 128_256, 2) == 4224
    # With this many rows, half of the memory limit is used.
    assert chunks.rows_of_a_chunk(65_536, 50_304, 2) == 9472
    assert chunks.rows_of_a_chunk(10**6, 50_304, 2) * 50_304 * 2 <= 2**30


@pytest.mark.parametrize(("classes", "seen"), [(33, 48), (40, 40)])
def test_matrix_products_have_aligned_dimensions(classes: int, seen: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding classes do not affect the result."""
    sides: list[set[int]] = []

    def noting(one: Tensor, other: Tensor, **options: object) -> Tensor:
        sides.append({*one.shape, *other.shape})
        return torch.ops.aten.mm(one, other, **options)

    monkeypatch.setattr(chunks, "_ALIGNMENT", 16)
    given = [tensor.to(DEVICE) for tensor in inputs(16, 8, classes)][:3]
    parameters = [tensor.requires_grad_() for tensor in given[:2]]
    wanted = torch.autograd.grad(reference.linear_cross_entropy(*given), parameters)
    monkeypatch.setattr(chunks.torch, "mm", noting)
    found = torch.autograd.grad(triton.linear_cross_entropy(*given), parameters)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
    assert sides == [{8, 16, seen}] * 3


def test_the_gradient_of_a_single_chunk_is_rounded_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 2**31)
    rows = {torch.bfloat16: 8192, torch.float32: 4096}
    for dtype, most in rows.items():
        assert chunks.sum_dtype(most, 128_256, dtype) == dtype
    assert chunks.sum_dtype(8320, 128_256, torch.bfloat16) == torch.float32
    assert chunks.sum_dtype(1, 128_256, torch.float16) == torch.float32


def test_passes_opcheck() -> None:
    hidden, weight, target, bias = (tensor.to(DEVICE) for tensor in inputs(5, 4, 9))
    hidden, bias = hidden.requires_grad_(), bias.requires_grad_()
    torch.library.opcheck(triton._reduced, (hidden, weight, bias, target, -100, 0.1, 0.01, True, [True, False, True]))
    torch.library.opcheck(triton._rows, (hidden, weight, bias, target, -100, 0.1, 0.01))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compiles_without_graph_breaks(reduction: str) -> None:
    hidden, weight, target, bias = (tensor.to(DEVICE) for tensor in inputs(9, 4, 13))
    parameters = (hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_())

    def head(hidden: Tensor) -> Tensor:
        options = {"z_loss": 0.01, "reduction": reduction, "implementation": "triton"}
        return linear_cross_entropy(hidden * 2, weight, target, bias, **options).square().sum()

    compiled, eager = torch.compile(head, fullgraph=True, backend="aot_eager")(hidden), head(hidden)
    torch.testing.assert_close(compiled, eager)
    torch.testing.assert_close(torch.autograd.grad(compiled, parameters), torch.autograd.grad(eager, parameters))

"""Tests the Triton kernels, on a GPU or interpreted on a CPU (as `make test` runs this file).

TRITON_INTERPRET must be set before Triton is imported.
"""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from redline.ops.cross_entropy import cross_entropy, reference

triton = pytest.importorskip("redline.ops.cross_entropy.triton")
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


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses small tiles, so that a short row has several blocks and the last one is partial."""
    for name in ("FORWARD_TILES", "GRADIENT_TILES"):
        monkeypatch.setattr(triton, name, dict.fromkeys((2, 4), triton.Tiles(64, 1)))


def inputs(rows: int, classes: int) -> tuple[Tensor, Tensor]:
    """Returns logits with a large spread, so that the running maximum changes between blocks."""
    return torch.randn(rows, classes) * 3, torch.randint(classes, (rows,))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "classes"), [(1, 1), (3, 7), (1, 64), (5, 128), (4, 197)], ids=lambda value: str(value)
)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_agrees(agrees: Agrees, rows: int, classes: int, dtype: torch.dtype, reduction: str) -> None:
    # With a single class, loss and gradient are 0 up to rounding.
    options = {"reduction": reduction} | ({"z_loss": 0.3} if classes == 1 else {})
    one, other = (partial(module.cross_entropy, **options) for module in (triton, reference))
    logits, target = inputs(rows, classes)
    if classes == 1:
        logits = logits + 2 * logits.sign()  # near 0 the gradient of the z-loss is 0 up to rounding
    agrees(one, other, (logits, target), dtype, DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_agrees_with_smoothing_z_loss_and_ignored_rows(agrees: Agrees, dtype: torch.dtype, reduction: str) -> None:
    logits, target = inputs(6, 131)
    target[[0, 4]] = -7
    options = {"ignore_index": -7, "label_smoothing": 0.15, "z_loss": 0.02, "reduction": reduction}
    one, other = (partial(module.cross_entropy, **options) for module in (triton, reference))
    agrees(one, other, (logits, target), dtype, DEVICE)


def test_ignore_index_may_be_a_class(agrees: Agrees) -> None:
    logits, target = inputs(5, 70)
    target[2:4] = 66
    agrees(
        partial(triton.cross_entropy, ignore_index=66),
        partial(reference.cross_entropy, ignore_index=66),
        (logits, target),
        device=DEVICE,
    )


def test_the_mean_of_ignored_rows_is_zero_even_with_nan_logits() -> None:
    logits = torch.full((3, 70), torch.nan, device=DEVICE, requires_grad=True)
    loss = triton.cross_entropy(logits, torch.full((3,), -100, device=DEVICE), label_smoothing=0.1)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert loss.item() == 0.0 and not gradient.any()


@pytest.mark.parametrize("wrong", [-1, 70, 2**31 + 5, -(2**40)])
def test_an_invalid_target_gives_nan_in_its_row_only(wrong: int) -> None:
    logits, target = (tensor.to(DEVICE) for tensor in inputs(3, 70))
    target[1] = wrong
    loss = triton.cross_entropy(logits.requires_grad_(), target, reduction="none")
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    assert loss.isnan().tolist() == [False, True, False]
    assert gradient.isnan().all(1).tolist() == gradient.isnan().any(1).tolist() == [False, True, False]


def test_logits_of_minus_infinity_have_no_effect() -> None:
    logits, target = (tensor.to(DEVICE) for tensor in inputs(2, 150))
    logits[0, :130], logits[1, 10:] = -torch.inf, torch.finfo(torch.float32).min
    target[:] = torch.tensor([140, 3])
    expected = reference.cross_entropy(logits.double(), target)
    torch.testing.assert_close(triton.cross_entropy(logits, target).double(), expected, atol=1e-6, rtol=1e-6)
    (gradient,) = torch.autograd.grad(triton.cross_entropy(logits.requires_grad_(), target), logits)
    assert gradient.isfinite().all() and not gradient[0, :130].any()


@pytest.mark.parametrize("of", ["columns", "rows", "step"])
def test_takes_any_strides_and_small_targets(of: str) -> None:
    logits, target = (tensor.to(DEVICE) for tensor in inputs(6, 140))
    given = {"columns": logits[:, 3:90], "rows": logits.t()[:, :5].t(), "step": logits[::2, ::2]}[of].requires_grad_()
    target = target[: len(given)].int() % given.shape[1]
    exact = given.detach().double().requires_grad_()
    found = triton.cross_entropy(given, target)
    expected = reference.cross_entropy(exact, target)
    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=1e-6)
    (one,), (other,) = torch.autograd.grad(found, given), torch.autograd.grad(expected, exact)
    torch.testing.assert_close(one.double(), other, atol=1e-6, rtol=1e-5)


def test_passes_opcheck() -> None:
    logits, target = (tensor.to(DEVICE) for tensor in inputs(3, 70))
    torch.library.opcheck(triton._forward, (logits.requires_grad_(), target, -100, 0.1, 0.01))


def test_compiles_without_graph_breaks() -> None:
    logits, target = (tensor.to(DEVICE) for tensor in inputs(4, 70))
    logits.requires_grad_()

    def head(logits: Tensor) -> Tensor:
        return cross_entropy(logits * 2, target, z_loss=1e-3, implementation="triton") * 3

    compiled, eager = torch.compile(head, fullgraph=True, backend="aot_eager")(logits), head(logits)
    torch.testing.assert_close(compiled, eager)
    torch.testing.assert_close(torch.autograd.grad(compiled, logits), torch.autograd.grad(eager, logits))

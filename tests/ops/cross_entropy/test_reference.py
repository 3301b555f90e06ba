"""Tests the reference of cross-entropy against PyTorch and finite differences."""

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from redline.ops.cross_entropy import cross_entropy, reference


def inputs(rows: int, classes: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    return (torch.randn(rows, classes, dtype=dtype) * 3).requires_grad_(), torch.randint(classes, (rows,))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize(("rows", "classes"), [(1, 1), (1, 7), (9, 257)])
def test_agrees_with_torch(rows: int, classes: int, smoothing: float, reduction: str) -> None:
    logits, target = inputs(rows, classes)
    if rows > 1:
        target[::4] = -100
    found = cross_entropy(logits, target, label_smoothing=smoothing, reduction=reduction)
    expected = F.cross_entropy(logits, target, label_smoothing=smoothing, reduction=reduction)
    torch.testing.assert_close(found, expected)
    grad = torch.randn_like(expected)
    torch.testing.assert_close(
        torch.autograd.grad(found, logits, grad), torch.autograd.grad(expected, logits, grad), atol=1e-12, rtol=1e-9
    )


def test_z_loss_adds_the_square_of_the_log_of_the_sum() -> None:
    logits, target = inputs(5, 11)
    target[1] = 3
    plain, more = (cross_entropy(logits, target, ignore_index=3, z_loss=z, reduction="none") for z in (0.0, 0.5))
    expected = torch.where(target == 3, 0.0, 0.5 * logits.exp().sum(1).log().square())
    torch.testing.assert_close(more - plain, expected)


def test_passes_gradcheck() -> None:
    logits, target = inputs(4, 6)
    target[2] = -100
    whole = partial(reference.cross_entropy, target_N=target, label_smoothing=0.2, z_loss=0.1)
    assert torch.autograd.gradcheck(whole, logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_loss_of_half_precision_logits_is_fp32(dtype: torch.dtype) -> None:
    logits, target = inputs(40, 33, dtype)
    loss = cross_entropy(logits, target)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), F.cross_entropy(logits.double(), target), atol=1e-5, rtol=1e-5)
    assert torch.autograd.grad(loss, logits)[0].dtype == dtype


def test_the_mean_of_ignored_rows_is_zero_and_so_are_its_gradients() -> None:
    logits, target = inputs(3, 5)
    loss = cross_entropy(logits, torch.full_like(target, -100), z_loss=0.1, label_smoothing=0.1)
    assert loss.item() == 0.0 and not torch.autograd.grad(loss, logits)[0].any()


def test_the_loss_of_no_rows_is_zero() -> None:
    logits, target = inputs(0, 5)
    assert cross_entropy(logits, target).item() == 0.0


@pytest.mark.parametrize("wrong", [-1, 5, 2**40])
def test_an_invalid_target_gives_nan(wrong: int) -> None:
    """Tests the behavior of a GPU, which does not check targets."""
    logits, target = inputs(3, 5)
    target[1] = wrong
    loss = reference.cross_entropy(logits, target, reduction="none")
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    assert loss.isnan().tolist() == gradient.isnan().all(1).tolist() == [False, True, False]
    assert reference.cross_entropy(logits, target).isnan()


def test_an_ignored_row_with_nan_has_no_effect() -> None:
    logits = torch.randn(3, 7)
    logits[1] = torch.nan
    logits.requires_grad_()
    loss = reference.cross_entropy(logits, torch.tensor([2, -100, 5]), z_loss=0.1, label_smoothing=0.1)
    loss.backward()
    assert loss.isfinite() and logits.grad.isfinite().all() and not logits.grad[1].any()


def test_the_reference_compiles_without_graph_breaks() -> None:
    logits, target = torch.randn(4, 9, requires_grad=True), torch.randint(9, (4,))
    whole = torch.compile(lambda logits: cross_entropy(logits, target), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(
        torch.autograd.grad(whole(logits), logits), torch.autograd.grad(cross_entropy(logits, target), logits)
    )

"""Tests causal attention with windows and documents against a softmax loop, and the GPU kernels against it."""

from typing import Any

import pytest
import torch
from torch import Tensor

from redline import nn
from redline.errors import MachineError
from redline.nn.causal_attention import causal_attention
from redline.nn.packing import Packing
from redline.training.determinism import deterministic


def written_out(q: Tensor, k: Tensor, v: Tensor, window: int | None, numbers: Tensor | None) -> Tensor:
    """Computes attention token by token and head by head, in fp64."""
    result = torch.zeros_like(q, dtype=torch.float64)
    q, k, v = q.double(), k.double(), v.double()
    shared = q.shape[2] // k.shape[2]
    for b in range(q.shape[0]):
        for s in range(q.shape[1]):
            first = 0 if window is None else max(0, s - window + 1)
            if numbers is not None:
                while first < s and (numbers[b, first : s + 1] != numbers[b, s]).any():
                    first += 1
            for h in range(q.shape[2]):
                scores = k[b, first : s + 1, h // shared] @ q[b, s, h] / q.shape[3] ** 0.5
                result[b, s, h] = scores.softmax(0) @ v[b, first : s + 1, h // shared]
    return result


def example(dtype: torch.dtype, device: str, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    # Slices of one tensor, as one projection produces them.
    qkv = torch.randn(2, 19, 6 + 2 + 2, head_dim, dtype=dtype, device=device)
    return qkv[:, :, :6], qkv[:, :, 6:8], qkv[:, :, 8:]


CASES = [(None, False), (1, False), (4, False), (19, False), (None, True), (4, True)]


@pytest.mark.parametrize(("window", "packed"), CASES)
def test_is_softmax_over_visible_tokens(window: int | None, packed: bool) -> None:
    q, k, v = example(torch.float64, "cpu", 6)
    numbers = torch.randint(2, (2, 19)).cumsum(1) if packed else None
    packing = None if numbers is None else Packing.of(numbers)
    found = causal_attention(q, k, v, window, packing)
    assert torch.allclose(found, written_out(q, k, v, window, numbers), atol=1e-12)


@pytest.mark.parametrize("window", [None, 4])
def test_rows_of_one_document_need_no_mask(monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    q, k, v = example(torch.float64, "cpu", 6)
    expected = causal_attention(q, k, v, window)
    asked: list[bool] = []

    def fused(*given: Tensor, attn_mask: Tensor | None, **others: object) -> Tensor:
        asked.append(attn_mask is not None)
        return attend(*given, attn_mask=attn_mask, **others)

    attend = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", fused)
    found = causal_attention(q, k, v, window, Packing.of(torch.ones(2, 19, dtype=torch.long)))
    assert torch.allclose(found, expected, atol=1e-12) and asked == [window is not None]


def test_falls_back_to_torch_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = example(torch.float64, "cpu", 64)
    monkeypatch.setattr(nn.causal_attention, "_kernels_are_faster", lambda *_: True)
    assert torch.equal(causal_attention(q, k, v, 4, None, "auto"), causal_attention(q, k, v, 4))
    monkeypatch.setattr(nn.causal_attention, "auto_implementation", lambda *_: "triton")
    with pytest.raises(MachineError, match="causal_attention: the Triton kernels cannot run"):
        causal_attention(q, k, v, 4, None, "auto")


@pytest.mark.gpu
@pytest.mark.parametrize(("window", "packed"), CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gpu_kernels_agree(window: int | None, packed: bool, dtype: torch.dtype) -> None:
    q, k, v = (t.detach().requires_grad_() for t in example(dtype, "cuda", 64))
    numbers = torch.randint(2, (2, 19)).cumsum(1) if packed else None
    packing = None if numbers is None else Packing.of(numbers).to("cuda")
    found = causal_attention(q, k, v, window, packing)
    exact = [t.detach().cpu().double().requires_grad_() for t in (q, k, v)]
    expected = causal_attention(*exact, window, None if numbers is None else Packing.of(numbers))
    rounding = 2 ** (-8 if dtype == torch.bfloat16 else -11)
    assert (found.cpu() - expected).norm() < 4 * rounding * expected.norm()
    upstream = torch.randn_like(found)
    gradients = torch.autograd.grad(found, (q, k, v), upstream)
    wanted = torch.autograd.grad(expected, exact, upstream.cpu().double())
    for one, other in zip(gradients, wanted, strict=True):
        # A token that sees only itself has zero gradients of query and key, up to the rounding of the values.
        assert (one.cpu() - other).norm() < 8 * rounding * max(other.norm(), 0.01 * wanted[2].norm())


@pytest.mark.gpu
@pytest.mark.parametrize(("window", "packed"), CASES)
def test_triton_kernels_agree(monkeypatch: pytest.MonkeyPatch, window: int | None, packed: bool) -> None:
    """`auto` runs redline.ops for windows and documents, and for whole rows if gradients must be deterministic."""
    q, k, v = (t.detach().requires_grad_() for t in example(torch.bfloat16, "cuda", 64))
    packing = Packing.of(torch.randint(2, (2, 19)).cumsum(1)).to("cuda") if packed else None
    calls: list[bool] = []
    kernels = nn.causal_attention.span_attention_op

    def counted(*given: Any, **options: Any) -> Tensor:
        calls.append(True)
        return kernels(*given, **options)

    monkeypatch.setattr(nn.causal_attention, "span_attention_op", counted)
    grad_output = torch.randn_like(q)

    def gradients(implementation: str) -> tuple[Tensor, ...]:
        found = causal_attention(q, k, v, window, packing, implementation)
        return found, *torch.autograd.grad(found, (q, k, v), grad_output)

    whole = window in (None, 19) and not packed
    expected = gradients("reference")
    assert not calls
    found = gradients("auto")
    assert len(calls) == (not whole)
    with deterministic(True):
        repeated, again = gradients("auto"), gradients("auto")
    assert len(calls) == (2 if whole else 3)
    names = ("output", "grad_q", "grad_k", "grad_v")
    assert [name for name, one, other in zip(names, repeated, again, strict=True) if not torch.equal(one, other)] == []
    for name, one, other, third in zip(names, expected, found, repeated, strict=True):
        size = max(one.norm(), 0.01 * expected[3].norm())
        errors = [((result - one).norm() / size).item() for result in (other, third)]
        assert max(errors) < 8 * 2**-8, (name, errors)


@pytest.mark.gpu
def test_rows_of_one_document_use_whole_row_attention_on_a_gpu() -> None:
    q, k, v = example(torch.bfloat16, "cuda", 64)
    packing = Packing.of(torch.ones(2, 19, dtype=torch.long)).to("cuda")
    assert torch.equal(causal_attention(q, k, v, None, packing), causal_attention(q, k, v))


@pytest.mark.gpu
def test_fp32_on_a_gpu_warns_that_it_is_slow() -> None:
    q, k, v = example(torch.float32, "cuda", 64)
    with pytest.warns(UserWarning, match="stores a mask of all queries times all keys"):
        found = causal_attention(q, k, v, 4)
    assert torch.allclose(found.cpu().double(), written_out(q.cpu(), k.cpu(), v.cpu(), 4, None), atol=1e-4)

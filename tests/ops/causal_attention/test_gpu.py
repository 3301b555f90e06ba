"""Tests causal attention on a GPU: full size, every dtype, CUDA graphs and compilation."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from redline.ops.causal_attention import Far, causal_attention, reference

pytestmark = pytest.mark.gpu
Agrees = Callable[..., None]


def documents(tokens: int, mean: int, window: int | None = None) -> Tensor:
    index = torch.arange(tokens, device="cuda", dtype=torch.int32)
    begins = torch.rand(tokens, device="cuda") < 1 / mean
    starts = torch.where(begins, index, 0).cummax(0).values.int()
    return starts if window is None else torch.maximum(starts, index - window + 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("heads", "groups", "dim"), [(4, 4, 64), (8, 2, 128), (3, 1, 32), (2, 2, 16)])
@pytest.mark.parametrize(("tokens", "mean", "window"), [(1024, 10_000, None), (1999, 170, None), (1001, 300, 129)])
def test_agrees(
    agrees: Agrees, heads: int, groups: int, dim: int, tokens: int, mean: int, window: int | None, dtype: torch.dtype
) -> None:
    low = documents(tokens, mean, window)
    agrees(
        lambda q, k, v: causal_attention(q, k, v, low),
        lambda q, k, v: reference.causal_attention(q, k, v, low),
        [torch.randn(tokens, count, dim, device="cuda") for count in (heads, groups, groups)],
        dtype,
        "cuda",
        # Probabilities are rounded before the product with the values, and again in backward.
        roundings=None if dtype == torch.float32 else 4,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("heads", "groups", "dim"), [(4, 4, 64), (8, 2, 128), (3, 1, 32), (2, 2, 16)])
@pytest.mark.parametrize(("tokens", "mean", "segment"), [(1024, 10_000, 256), (1999, 170, 32), (1001, 300, 128)])
def test_far_keys_agree(
    agrees: Agrees, heads: int, groups: int, dim: int, tokens: int, mean: int, segment: int, dtype: torch.dtype
) -> None:
    first = documents(tokens, mean)
    low = torch.maximum(first, torch.arange(tokens, device="cuda") // segment * segment - segment).int()

    def of(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda q, k, v, far_q, far_k, bias: attend(q, k, v, low, far=Far(far_q, far_k, bias, first))

    tensors = [torch.randn(tokens, count, dim, device="cuda") for count in (heads, groups, groups, heads, groups)]
    agrees(
        of(causal_attention),
        of(reference.causal_attention),
        [*tensors, torch.randn(tokens, device="cuda")],
        dtype,
        "cuda",
        roundings=None if dtype == torch.float32 else 4,
    )


@pytest.mark.parametrize("far", [False, True])
def test_is_deterministic(repeats: Callable[..., None], far: bool) -> None:
    first, index = documents(4096, 500), torch.arange(4096, device="cuda", dtype=torch.int32)
    inputs = [
        torch.randn(4096, heads, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for heads in (12, 4, 4, 12, 4)[: 5 if far else 3]
    ]
    if not far:
        return repeats(lambda q, k, v: causal_attention(q, k, v, first), inputs)
    low, bias = torch.maximum(first, index - 99), torch.randn(4096, device="cuda", requires_grad=True)
    return repeats(
        lambda q, k, v, *others: causal_attention(q, k, v, low, far=Far(*others, first)),
        [*inputs, bias],
    )


def test_inductor_compiles_training_without_graph_breaks(compiled_agrees: Callable[..., None]) -> None:
    low = documents(300, 100)

    def block(x: Tensor) -> Tensor:
        q, k, v = (x * 2).unflatten(-1, (8, 64)).split((4, 2, 2), 1)
        return causal_attention(q, k, v, low)

    compiled_agrees(block, [torch.randn(300, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)])


def test_no_scores_are_stored() -> None:
    q, k, v = (torch.randn(65_536, 12, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    low = documents(65_536, 2_000)
    torch.autograd.grad(causal_attention(q, k, v, low).sum(), (q, k, v))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(causal_attention(q, k, v, low), (q, k, v), torch.ones_like(q))
    # The output, its gradient, three gradients, and two values per head and token.
    assert torch.cuda.max_memory_allocated() - before < 5.5 * q.nbytes
    far = Far(q, k, torch.randn(65_536, device="cuda", requires_grad=True), low)
    near, before = torch.arange(65_536, device="cuda", dtype=torch.int32), torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(causal_attention(q, k, v, near, far=far), (q, k, v, far.bias_T), torch.ones_like(q))
    # The same for far keys.
    assert torch.cuda.max_memory_allocated() - before < 8 * q.nbytes

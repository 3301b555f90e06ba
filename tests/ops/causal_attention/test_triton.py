"""Tests the Triton kernels of causal attention, on a GPU or interpreted on a CPU."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from redline.errors import MachineError
from redline.ladder.measuring.flops import counting_flops
from redline.nn.causal_attention import causal_attention as attention_of_a_layer
from redline.nn.packing import Packing
from redline.ops.causal_attention import Far, causal_attention, reference

triton = pytest.importorskip("redline.ops.causal_attention.triton")
DEVICE = "cpu" if triton.kernel.INTERPRETED else "cuda"
Agrees = Callable[..., None]

pytestmark = pytest.mark.skipif(
    not triton.kernel.INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA device or TRITON_INTERPRET=1"
)


def lowest(tokens: int, begins: tuple[int, ...], window: int | None) -> Tensor:
    """Returns the lowest visible token for documents that start at these tokens, with a window."""
    index = torch.arange(tokens, device=DEVICE, dtype=torch.int32)
    starts = torch.zeros_like(index)
    for begin in begins:
        starts[begin:] = begin
    return starts if window is None else torch.maximum(starts, index - window + 1)


def compare(agrees: Agrees, low: Tensor, sizes: tuple[int, int, int], dtype: torch.dtype = torch.float32) -> None:
    """Compares the kernels with the reference. `sizes` are query heads, key heads and channels."""
    heads, shared, dim = sizes
    agrees(
        lambda q, k, v: triton.causal_attention(q, k, v, low),
        lambda q, k, v: reference.causal_attention(q, k, v, low),
        [torch.randn(len(low), count, dim) for count in (heads, shared, shared)],
        dtype,
        DEVICE,
    )


def compare_with_far(
    agrees: Agrees, low: Tensor, first: Tensor, sizes: tuple[int, int, int], dtype: torch.dtype = torch.float32
) -> None:
    heads, shared, dim = sizes

    def given(
        attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, far_q: Tensor, far_k: Tensor, bias: Tensor
    ) -> Tensor:
        return attend(q, k, v, low, Far(far_q, far_k, bias, first))

    tensors = [torch.randn(len(low), count, dim) for count in (heads, shared, shared, heads, shared)]
    agrees(
        partial(given, triton.causal_attention),
        partial(given, reference.causal_attention),
        [*tensors, 2 * torch.randn(len(low))],
        dtype,
        DEVICE,
    )


# Tiles have 32 tokens: some sequences end inside a tile, some at its end.
TOKENS = 70
STRETCHES = [((), None), ((13, 32, 33, 50), None), ((), 40), ((50,), 33), (tuple(range(0, 70, 3)), 2), ((69,), 1)]


@pytest.mark.parametrize(
    ("begins", "window", "dtype"), [*((*one, torch.float32) for one in STRETCHES), (*STRETCHES[3], torch.float16)]
)
def test_agrees(agrees: Agrees, begins: tuple[int, ...], window: int | None, dtype: torch.dtype) -> None:
    compare(agrees, lowest(TOKENS, begins, window), (2, 1, 16), dtype)


FAR = [((), 1), ((13, 32, 33, 50), 10), ((20,), 33), (tuple(range(0, 70, 3)), 2), ((69,), 64)]


@pytest.mark.parametrize(
    ("begins", "window", "dtype"), [*((*one, torch.float32) for one in FAR), (*FAR[1], torch.float16)]
)
def test_far_keys_agree(agrees: Agrees, begins: tuple[int, ...], window: int, dtype: torch.dtype) -> None:
    compare_with_far(agrees, lowest(TOKENS, begins, window), lowest(TOKENS, begins, None), (2, 1, 16), dtype)


@pytest.mark.parametrize(("tokens", "heads", "shared", "dim"), [(1, 1, 1, 16), (33, 3, 3, 32), (70, 2, 1, 128)])
def test_far_keys_agree_at_odd_sizes(agrees: Agrees, tokens: int, heads: int, shared: int, dim: int) -> None:
    first = lowest(tokens, (tokens // 2,), None).long()
    segments = torch.arange(tokens, device=DEVICE) // 8 * 8
    compare_with_far(agrees, torch.maximum(first, segments), first, (heads, shared, dim))


@pytest.mark.parametrize("tiles", [(64, 16), (16, 64)])
def test_far_keys_agree_with_any_tiles(agrees: Agrees, monkeypatch: pytest.MonkeyPatch, tiles: tuple[int, int]) -> None:
    monkeypatch.setattr(triton, "_SMALL", triton.Tiles(*tiles, 4, 2, 99))
    compare_with_far(agrees, lowest(TOKENS, (10, 50), 20), lowest(TOKENS, (10, 50), None), (1, 1, 16))


def test_far_keys_may_start_before_the_first_token(agrees: Agrees) -> None:
    index = torch.arange(40, device=DEVICE)
    for far, near in ((20, 3), (60, 3), (60, 50)):
        compare_with_far(agrees, (index - near).int(), index - far, (1, 1, 16))


def test_far_keys_of_any_strides_are_read_in_place() -> None:
    """The strides of far keys differ from those of near keys."""
    q, k, v = torch.randn(40, 6, 16, device=DEVICE).split((2, 2, 2), 1)
    far_q = torch.randn(2, 40, 16, device=DEVICE).transpose(0, 1)
    far_k = torch.randn(40, 16, 2, device=DEVICE).transpose(1, 2)
    inputs = [t.detach().requires_grad_() for t in (q, k, v, far_q, far_k, torch.randn(80, device=DEVICE)[::2])]
    first = lowest(40, (7,), None).repeat_interleave(2)[::2]
    low = torch.maximum(first, torch.arange(40, device=DEVICE) - 9)
    both = [
        attend(*inputs[:3], low, Far(inputs[3], inputs[4], inputs[5], first))
        for attend in (triton.causal_attention, reference.causal_attention)
    ]
    torch.testing.assert_close(*both)
    grad = torch.randn_like(both[0])
    for one, other in zip(*(torch.autograd.grad(out, inputs, grad) for out in both), strict=True):
        torch.testing.assert_close(one, other)


def test_far_keys_may_all_have_a_bias_of_minus_infinity() -> None:
    """A token always sees itself, so far keys with a bias of -inf give no NaN."""
    tensors = [torch.randn(70, 1, 16, device=DEVICE).requires_grad_() for _ in range(5)]
    bias = torch.full((70,), -torch.inf, device=DEVICE)
    low, first = lowest(70, (), 20), lowest(70, (), None)
    q, k, v, far_q, far_k = tensors
    found = triton.causal_attention(q, k, v, low, Far(far_q, far_k, bias, first))
    expected = triton.causal_attention(q, k, v, low)
    torch.testing.assert_close(found, expected)
    grad = torch.randn_like(found)
    near = torch.autograd.grad(expected, tensors[:3], grad)
    grads = torch.autograd.grad(found, tensors, grad)
    for one, other in zip(grads, (*near, torch.zeros_like(q), torch.zeros_like(k)), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(("tokens", "heads", "shared", "dim"), [(1, 1, 1, 16), (33, 3, 3, 32), (70, 2, 1, 128)])
def test_agrees_at_odd_sizes(agrees: Agrees, tokens: int, heads: int, shared: int, dim: int) -> None:
    low = lowest(tokens, (tokens // 2,), None).long()
    compare(agrees, low, (heads, shared, dim))


def test_a_window_may_start_before_the_first_token(agrees: Agrees) -> None:
    low = torch.arange(40, device=DEVICE) - 19
    compare(agrees, low, (1, 1, 16))


@pytest.mark.parametrize("tiles", [(64, 16), (16, 64)])
def test_any_tiles_agree(agrees: Agrees, monkeypatch: pytest.MonkeyPatch, tiles: tuple[int, int]) -> None:
    monkeypatch.setattr(triton, "_SMALL", triton.Tiles(*tiles, 4, 2, 99))
    compare(agrees, lowest(TOKENS, (10, 50), 40), (1, 1, 16))


def test_large_scores_stay_finite() -> None:
    q, k, v = (size * torch.randn(70, 1, 16, device=DEVICE) for size in (30, 30, 1))
    inputs, low = [t.requires_grad_() for t in (q, k, v)], lowest(70, (33,), None)
    found = triton.causal_attention(*inputs, low)
    expected = reference.causal_attention(*(t.double() for t in inputs), low)
    # Exponents are in the thousands, where the spacing of fp32 is 1e-4.
    torch.testing.assert_close(found.double(), expected, atol=5e-4, rtol=0)
    grad = torch.randn_like(found)
    gradients = torch.autograd.grad(found, inputs, grad), torch.autograd.grad(expected, inputs, grad.double())
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=5e-4, rtol=1e-3)


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.filterwarnings("ignore:attention in float32 with packed documents")  # the fallback warning of a GPU
def test_the_attention_layer_agrees(window: int | None, packed: bool) -> None:
    q, k, v = torch.randn(2, 40, 4, 16, device=DEVICE).split((2, 1, 1), 2)
    packing = Packing.of(torch.randint(2, (2, 40)).cumsum(1)).to(DEVICE) if packed else None
    found = attention_of_a_layer(q, k, v, window, packing, "triton")
    torch.testing.assert_close(found, attention_of_a_layer(q, k, v, window, packing))


def test_slices_and_any_strides_are_read_in_place() -> None:
    packed = torch.randn(40, 6, 16, device=DEVICE)
    q, k, v = packed.split((2, 2, 2), 1)
    scattered = torch.randn(40, 16, 2, device=DEVICE).transpose(1, 2)
    low = lowest(40, (7,), None)
    for given in ((q, k, v), (scattered, k, scattered)):
        inputs = [t.detach().requires_grad_() for t in given]
        both = [function(*inputs, low) for function in (triton.causal_attention, reference.causal_attention)]
        torch.testing.assert_close(*both)
        grad = torch.randn(2, 40, 16, device=DEVICE).transpose(0, 1)
        for one, other in zip(*(torch.autograd.grad(out, inputs, grad) for out in both), strict=True):
            torch.testing.assert_close(one, other)


def test_nan_spreads_only_to_tokens_that_see_it() -> None:
    q, k, v = (torch.randn(40, 1, 16, device=DEVICE) for _ in range(3))
    v[10] = torch.nan
    found = triton.causal_attention(q, k, v, lowest(40, (5, 30), None))
    assert found[10:30].isnan().all()


def test_flops_are_counted_by_visible_pairs() -> None:
    q, k, v = (torch.randn(20, heads, 16, device=DEVICE, requires_grad=True) for heads in (2, 1, 1))
    with counting_flops() as counter:
        triton.causal_attention(q, k, v, torch.arange(20, device=DEVICE) - 3).sum().backward()
    seen = 1 + 2 + 3 + 4 * 17
    assert counter.get_total_flops() == 2 * (2 + 5) * 2 * 16 * seen
    with counting_flops() as counter:
        far = Far(q, k, torch.zeros(20, device=DEVICE), torch.zeros(20, dtype=torch.int64, device=DEVICE))
        triton.causal_attention(q, k, v, torch.arange(20, device=DEVICE), far).sum().backward()
    assert counter.get_total_flops() == 2 * (2 + 5) * 2 * 16 * sum(range(21))


def test_passes_opcheck() -> None:
    q, k, v = (torch.randn(5, heads, 16, device=DEVICE, requires_grad=True) for heads in (2, 1, 1))
    low = lowest(5, (2,), None)
    torch.library.opcheck(triton._forward, (q, k, v, low))
    bias = torch.randn(5, device=DEVICE, requires_grad=True)
    torch.library.opcheck(triton._forward, (q, k, v, torch.maximum(low, lowest(5, (), 2)), q, k, bias, low))


def test_compiles_without_graph_breaks(compiled_agrees: Callable[..., None]) -> None:
    low = lowest(20, (7,), None)

    def block(x: Tensor) -> Tensor:
        q, k, v = (x + 1).unflatten(-1, (4, 16)).split((2, 1, 1), 1)
        return causal_attention(q, k, v, low, "triton")

    compiled_agrees(block, [torch.randn(20, 64, device=DEVICE, requires_grad=True)])


def test_far_keys_compile_without_graph_breaks(compiled_agrees: Callable[..., None]) -> None:
    """The bias is computed in the same graph, where the gradients of flex attention are wrong."""
    low, first = lowest(20, (7,), 5), lowest(20, (7,), None)

    def block(x: Tensor, scores: Tensor) -> Tensor:
        q, k, v, far_q, far_k = (x + 1).unflatten(-1, (7, 16)).split((2, 1, 1, 2, 1), 1)
        bias = torch.nn.functional.logsigmoid(scores)
        return causal_attention(q, k, v, low, "triton", far=Far(far_q, far_k, bias, first))

    compiled_agrees(block, [torch.randn(20, *size, device=DEVICE, requires_grad=True) for size in ((112,), ())])


@pytest.mark.parametrize(
    ("q", "sentence"),
    [
        (torch.zeros(2, 1, 16, dtype=torch.float64), "unsupported dtype float64 .*float32."),
        (torch.zeros(2, 1, 24), "unsupported head dimension 24 .supported: 16, 32, 64, 128"),
    ],
)
def test_unsupported_inputs_are_refused(q: Tensor, sentence: str) -> None:
    q = q.to(DEVICE)
    with pytest.raises(MachineError, match=sentence):
        causal_attention(q, q, q, torch.zeros(2, dtype=torch.int32, device=DEVICE), "triton")


def test_the_head_dimension_is_separate_from_the_tensor() -> None:
    """A layer chooses before it has queries, by the device and dtype of a weight."""
    assert not triton.why_not(torch.zeros(768, 768, device=DEVICE), 64)
    assert "dimension 768" in triton.why_not(torch.zeros(768, 64, device=DEVICE), 768)

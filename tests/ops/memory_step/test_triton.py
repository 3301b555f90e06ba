"""Tests the kernel of the memory step, on a GPU or interpreted on a CPU."""

import pytest
import torch

from redline.errors import MachineError
from redline.ops.memory_step import memory_step

from .by_hand import EPS, Sizes, assert_near, example

triton = pytest.importorskip("redline.ops.memory_step.triton")
DEVICE = "cpu" if triton.kernel.INTERPRETED else "cuda"
DTYPES = [torch.float32, torch.float16] + ([] if triton.kernel.INTERPRETED else [torch.bfloat16])

pytestmark = pytest.mark.skipif(
    not triton.kernel.INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA device or TRITON_INTERPRET=1"
)


def check(sizes: Sizes, dtype: torch.dtype) -> None:
    given = example(sizes, dtype, DEVICE)
    before = [tensor.clone() for tensor in (given[2], given[3])]
    with torch.no_grad():
        found = memory_step(*given, EPS, "triton")
    assert [one.dtype for one in found] == [dtype, dtype, torch.float32]
    # Only the outputs are rounded.
    exact = torch.finfo(torch.float32).eps
    assert_near(found, given, of_read=8 * exact + torch.finfo(dtype).eps, of_state=8 * exact)
    assert torch.equal(given[2], before[0]) and torch.equal(given[3], before[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(2, 3, 8, 8, 4), (1, 1, 5, 7, 1), (3, 2, 17, 33, 2)])
def test_agrees_with_a_step_by_hand(sizes: Sizes, dtype: torch.dtype) -> None:
    check(sizes, dtype)


def test_a_small_decay_is_accurate() -> None:
    """After a thousand tokens that write nothing, the state has decayed by the sum of the decays."""
    token, learned, recent, state = example((1, 1, 4, 4, 1), torch.float32, DEVICE)
    token = token._replace(strength_BH=torch.full_like(token.strength_BH, -60.0))
    token.decay_BH.fill_(-9.0)
    learned.decay_bias_H.zero_()
    learned.log_rate_H.zero_()
    first, steps = state, 25 if triton.kernel.INTERPRETED else 1000
    with torch.no_grad():
        for _ in range(steps):
            _, recent, state = memory_step(token, learned, recent, state, EPS, "triton")
    left = torch.exp(-steps * torch.log1p(torch.exp(torch.tensor(-9.0, dtype=torch.float64)))).item()
    torch.testing.assert_close(state.double(), left * first.double(), rtol=steps * 3e-7, atol=0)


def test_passes_opcheck() -> None:
    token, learned, recent, state = example((1, 2, 4, 4, 2), torch.float32, DEVICE)
    torch.library.opcheck(triton._step, ([*token, *learned, recent, state], EPS))


def test_unsupported_inputs_are_refused() -> None:
    token, learned, recent, state = example((1, 1, 4, 4, 2), torch.float32, DEVICE)
    with pytest.raises(MachineError, match="no backward pass"):
        memory_step(token, learned, recent, state.requires_grad_(), EPS, "triton")
    with pytest.raises(MachineError, match="the state must be float32"):
        memory_step(token, learned, recent, state.detach().double(), EPS, "triton")
    token, learned, recent, state = example((1, 1, 256, 256, 2), torch.float32, DEVICE)
    with pytest.raises(MachineError, match="at most 32768 elements, not 256 × 256"):
        memory_step(token, learned, recent, state, EPS, "triton")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_agrees_at_the_size_of_a_model(dtype: torch.dtype) -> None:
    check((4, 12, 64, 64, 4), dtype)
    check((1, 8, 128, 256, 4), dtype)


@pytest.mark.gpu
def test_a_cuda_graph_replay_is_deterministic() -> None:
    given = example((2, 12, 64, 64, 4), torch.bfloat16, "cuda")
    with torch.no_grad():
        expected = memory_step(*given, EPS)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replayed = memory_step(*given, EPS)
        for _ in range(3):
            graph.replay()
            assert all(torch.equal(one, other) for one, other in zip(replayed, expected, strict=True))


@torch.no_grad()
def test_compiles_without_graph_breaks() -> None:
    token, learned, recent, state = example((1, 2, 4, 4, 2), torch.float32, DEVICE)

    def stepped(recent: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return memory_step(token, learned, recent, 2 * state, EPS, "triton")

    compiled = torch.compile(stepped, fullgraph=True, backend="inductor" if DEVICE == "cuda" else "aot_eager")
    for one, other in zip(compiled(recent, state), stepped(recent, state), strict=True):
        torch.testing.assert_close(one, other)

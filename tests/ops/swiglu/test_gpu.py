"""Tests SwiGLU on a GPU: full size, every dtype, CUDA graphs and compilation."""

from collections.abc import Callable

import pytest
import torch

from redline.ops.swiglu import packed_swiglu, reference, swiglu

pytestmark = pytest.mark.gpu
Agrees = Callable[..., None]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(512, 11008), (4000, 2048), (1001, 777), (3,)])
def test_agrees(agrees: Agrees, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    agrees(swiglu, reference.swiglu, tuple(torch.randn(2, *shape, device="cuda")), dtype, "cuda")


def test_agrees_at_full_size(agrees: Agrees) -> None:
    test_agrees(agrees, (8192, 11008), torch.bfloat16)


@pytest.mark.parametrize("shape", [(2, 1000, 22016), (5, 77, 1554)])
def test_agrees_on_halves_of_one_tensor(agrees: Agrees, shape: tuple[int, ...]) -> None:
    def halves(x: torch.Tensor) -> torch.Tensor:
        return swiglu(*x.chunk(2, -1))

    agrees(
        halves,
        lambda x: reference.swiglu(*x.chunk(2, -1)),
        (torch.randn(shape, device="cuda"),),
        torch.bfloat16,
        "cuda",
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(2, 1000, 22016), (4000, 4096), (5, 77, 1554), (6,)])
def test_agrees_on_a_packed_tensor(agrees: Agrees, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    agrees(packed_swiglu, reference.packed_swiglu, (torch.randn(shape, device="cuda"),), dtype, "cuda")


def test_the_gradient_of_a_packed_tensor_is_written_once() -> None:
    gate_up = torch.randn(4096, 8192, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    torch.autograd.grad(packed_swiglu(gate_up), gate_up, grad)
    out = packed_swiglu(gate_up)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    (found,) = torch.autograd.grad(out, gate_up, grad)
    assert torch.cuda.max_memory_allocated() - before == found.nbytes


def test_halves_are_read_without_a_copy() -> None:
    gate, up = torch.randn(4096, 8192, device="cuda", dtype=torch.bfloat16).chunk(2, -1)
    swiglu(gate, up)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = swiglu(gate, up)
    assert torch.cuda.max_memory_allocated() - before == out.nbytes


def test_offsets_beyond_32_bits() -> None:
    x = torch.randn(300_000, 16384, device="cuda", dtype=torch.bfloat16)
    for gate, up in (x.chunk(2, -1), x.chunk(2, 0)):
        found, expected = swiglu(gate, up)[-3:], reference.swiglu(gate[-3:], up[-3:])
        assert (found.float() - expected.float()).norm() <= 0.01 * expected.float().norm()
        del found, expected


def test_is_deterministic(repeats: Callable[..., None]) -> None:
    inputs = [torch.randn(999, 2048, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2)]
    repeats(swiglu, inputs)
    repeats(packed_swiglu, inputs[:1])


def test_inductor_compiles_training_without_graph_breaks(compiled_agrees: Callable[..., None]) -> None:
    x = torch.randn(640, 2048, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    compiled_agrees(lambda x: swiglu(*(x * 2).chunk(2, -1)).sin(), [x])
    compiled_agrees(lambda x: packed_swiglu(x * 2).sin(), [x])

"""On a GPU: recorded as one CUDA graph, compiled, and in half precision, it is the same model."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch

from redline.models.lsd import SIZES, Lsd

pytestmark = pytest.mark.gpu


def case(height: int = 120, width: int = 100) -> tuple[Lsd, tuple[torch.Tensor, ...]]:
    model = Lsd(SIZES["tiny"]).eval().cuda()
    pictures = (torch.rand(3, 1, 3, height, width, device="cuda") * 2 - 1).unbind(0)
    return model, (*pictures, torch.tensor([999], device="cuda"), torch.rand(1, 8, device="cuda"))


def relative(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.float() - other.float()).norm() / other.float().norm())


@torch.inference_mode()
def test_a_captured_graph_reads_its_static_buffers() -> None:
    model, inputs = case()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            model(*inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        output = model(*inputs)
    for _ in range(3):
        for buffer in (*inputs[:3], inputs[4]):
            buffer.copy_(torch.rand_like(buffer))
        inputs[3].fill_(int(torch.randint(1000, ())))
        graph.replay()
        torch.cuda.synchronize()
        torch.testing.assert_close(output, model(*inputs), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@torch.inference_mode()
def test_compiled_whole_and_in_half_precision(dtype: torch.dtype) -> None:
    model, inputs = case(64, 96)
    # Convolutions of another layout may round to TF32 where others do not, layer after layer.
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        expected = model(*inputs) - inputs[1]
        model = model.to(dtype).to(memory_format=torch.channels_last)
        found = torch.compile(model, fullgraph=True, dynamic=False)(*inputs) - inputs[1]
    assert relative(found, expected) < (2e-3 if dtype == torch.float32 else 3e-2)


@torch.inference_mode()
def test_a_forward_pass_does_not_synchronize(waits_for_nobody: Callable[[], AbstractContextManager[None]]) -> None:
    model, inputs = case()
    model(*inputs)
    with waits_for_nobody():
        model(*inputs)

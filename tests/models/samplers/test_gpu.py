"""A whole frame of model and sampler in one CUDA graph, retuned after recording, without waiting for the device."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch

from redline.models.lsd import PREDICTION, PROCESS, SIZES, Lsd
from redline.models.samplers import SAMPLERS, Sampler, sampler_table

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", sorted(SAMPLERS))
@torch.inference_mode()
def test_a_captured_frame_reads_its_buffers_and_strength(name: str) -> None:
    model = Lsd(SIZES["tiny"]).eval().cuda()
    tables = [sampler_table(name, PROCESS, PREDICTION, 3, strength) for strength in (1.0, 0.6)]
    sampler = Sampler(tables[0], "cuda")
    frame, previous = (torch.rand(2, 1, 3, 64, 96, device="cuda") * 2 - 1).unbind(0)
    noise = torch.randn(sampler.noises, 1, 3, 64, 96, device="cuda")

    def whole() -> torch.Tensor:
        return sampler.sample(lambda noisy, times: model(noisy, frame, previous, times), noise, frame)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            whole()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        output = whole()
    seen = []
    for table in (*tables, tables[0]):
        for buffer in (frame, previous, noise):
            buffer.copy_(torch.randn_like(buffer).clamp(-1, 1))
        sampler.retune(table)
        graph.replay()
        torch.cuda.synchronize()
        torch.testing.assert_close(output, whole(), rtol=1e-3, atol=1e-3)
        seen.append(output.clone())
    assert not torch.equal(seen[0], seen[1])


@pytest.mark.parametrize("name", sorted(SAMPLERS))
@torch.inference_mode()
def test_a_frame_does_not_synchronize(name: str, waits_for_nobody: Callable[[], AbstractContextManager[None]]) -> None:
    sampler = Sampler(sampler_table(name, PROCESS, PREDICTION, 3), "cuda")
    noise = torch.randn(sampler.noises, 1, 3, 16, 16, device="cuda")
    other = sampler_table(name, PROCESS, PREDICTION, 3, 0.5)
    sampler.sample(lambda noisy, times: torch.sin(noisy) + times, noise)
    with waits_for_nobody():
        sampler.retune(other)
        sampler.sample(lambda noisy, times: torch.sin(noisy) + times, noise)

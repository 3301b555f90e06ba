"""Which attention kernel runs: what the proof names, what the profiler sees, and the choice on a GPU."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from redline.ladder.job import Job, entered
from redline.ladder.metrics import relative_error
from redline.ladder.plan import Plan
from redline.ladder.rewrites.attention import AttentionCall
from redline.ladder.rungs.sdpa import Sdpa
from redline.machine.machine import Machine
from tiny_attention import Plain, Stack

from .test_sdpa import applied, fp64, inputs


def kernels_that_ran(job: Job, x: Tensor) -> set[str]:
    with profile(activities=[ProfilerActivity.CPU]) as profiler, torch.no_grad(), entered(job.contexts):
        job.model(x)
    return {event.key for event in profiler.key_averages()}


@pytest.mark.parametrize("backend,flash", [("default", True), ("flash", True), ("math", False)])
def test_proof_names_the_kernel_that_the_profiler_sees(backend: str, flash: bool) -> None:
    plan, job = applied(Plain().eval(), inputs(0), f"sdpa(backend={backend})")
    ran = "aten::_scaled_dot_product_flash_attention_for_cpu" in kernels_that_ran(job, inputs(1))
    assert ran is flash
    assert f"1 call with the {'flash' if flash else 'math'} kernel" in plan.rungs[0].proof(job)


@pytest.mark.parametrize("backend,flash", [("default", True), ("math", False)])
def test_a_compiler_traces_under_the_chosen_kernel(backend: str, flash: bool) -> None:
    torch.manual_seed(0)
    model = Stack(Plain(), Plain(), Plain()).eval()
    _, job = applied(model, inputs(0), f"sdpa(backend={backend})")
    graphs: list[str] = []

    def look(module: torch.fx.GraphModule, example: list[Tensor]) -> Any:
        from torch._dynamo.backends.common import aot_autograd

        def note(inner: torch.fx.GraphModule, _: list[Tensor]) -> Any:
            graphs.append(inner.code)
            return inner.forward

        return aot_autograd(fw_compiler=note)(module, example)

    torch._dynamo.reset()
    job.model.compile(backend=look, fullgraph=True)
    x = inputs(1)
    assert relative_error([fp64(model, x)], [job.finish()(x)]) < 1e-5
    assert len(graphs) == 1
    assert ("flash_attention" in graphs[0]) is flash


def test_random_arguments_have_the_shapes_of_the_call() -> None:
    call_ = AttentionCall((2, 3, 5, 8), (2, 3, 9, 8), (2, 3, 9, 4), mask=(5, 9), boolean_mask=True)
    given = call_.inputs(torch.float32, torch.device("cpu"))
    assert F.scaled_dot_product_attention(**given).shape == (2, 3, 5, 4)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("training", [False, True])
def test_on_cuda_the_fastest_kernel_is_chosen_and_runs(training: bool) -> None:
    torch.manual_seed(0)

    class Wide(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.heads, self.scale = 4, 64**-0.5
            self.qkv, self.proj = nn.Linear(256, 768), nn.Linear(256, 256)

    model = Stack(*(Wide() for _ in range(3))).cuda().train(training)
    x = inputs(0, 2, 200, 256).cuda()
    extra = {"loss": lambda y, b: (y**2).mean(), "optimizer": lambda ps: torch.optim.SGD(ps, lr=0.01)}
    job = Job.of(model, (x,), **(extra if training else {}))
    plan, job = Plan.parse("sdpa + bf16").build(job, Machine.detect("cuda"))
    chosen = plan.rungs[0]
    assert isinstance(chosen, Sdpa) and chosen.backend in ("cudnn", "flash", "efficient") and chosen.dtype == "bf16"
    assert f"3 calls with the {chosen.backend} kernel in bf16" in chosen.proof(job)
    output = job.finish()(x)
    if not training:
        # Three blocks in bf16: each rounds at 2^-9.
        assert relative_error([fp64(model, x)], [output]) < 3e-2
    assert torch.isfinite(output).all()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["cudnn", "flash", "efficient", "math"])
def test_on_cuda_every_kernel_runs_when_asked(backend: str) -> None:
    q = torch.randn(2, 4, 128, 64, device="cuda", dtype=torch.bfloat16)

    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Parameter(torch.zeros(1))

        def forward(self, q: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, q, q)

    plan, job = Plan.parse(f"sdpa(backend={backend})").build(Job.of(Bare().cuda(), (q,)), Machine.detect("cuda"))
    run = job.finish()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        output = run(q)
    ops = " ".join(event.key for event in profiler.key_averages())
    assert f"_scaled_dot_product_{backend}" in ops if backend != "math" else "attention_math" in ops
    assert relative_error([F.scaled_dot_product_attention(*[q.double()] * 3)], [output]) < 1e-2

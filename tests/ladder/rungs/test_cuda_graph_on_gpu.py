import gc

import pytest
import torch
from torch import Tensor, nn

from redline.errors import RungError
from redline.ladder.job import Job
from redline.ladder.metrics import relative_error
from redline.ladder.plan import Plan
from redline.ladder.rungs.cuda_graph import CudaGraph
from redline.machine.cuda_graphs import CaptureCounts, CudaGraphCapturer, GraphedCallable
from redline.machine.machine import Machine

from .test_cuda_graph import Net, inputs, training_job

GPU = "cuda:0"


@pytest.mark.gpu
def test_on_cuda_replays_equal_eager_and_can_be_fed_back() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)).eval().cuda()
    for clone in (True, False):
        plan, job = Plan((CudaGraph(clone=clone),)).build(Job.of(model), Machine.detect("cuda"))
        run = job.finish()
        for rows in (1, 7, 1, 3):
            x = y = inputs(rows, rows, 16).to(GPU)
            for _ in range(5):
                x = run(x)
                with torch.no_grad():
                    y = model(y)
            assert relative_error([y], [x]) < 1e-6
        assert job.evidence["cuda_graph"].graphs == 3
        proof = plan.rungs[0].proof(job)
        assert proof.startswith("3 graphs captured, 20 replays, ") and "0 B" not in proof


@pytest.mark.gpu
def test_on_cuda_results_are_kept_across_graphs_that_share_a_pool() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).eval().cuda()
    run = Plan.parse("cuda_graph").build(Job.of(model), Machine.detect("cuda"))[1].finish()
    batches = [inputs(seed, 1 + seed % 3, 64).to(GPU) for seed in range(12)]
    seen = [run(x) for x in batches]
    with torch.no_grad():
        expected = [model(x) for x in batches]
    assert relative_error(expected, seen) < 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("drop", [0.0, 0.3])
@pytest.mark.parametrize("optimizer", ["sgd", "sgd, momentum with dampening", "adamw"])
def test_on_cuda_training_equals_eager_step_by_step(optimizer: str, drop: float) -> None:
    torch.manual_seed(0)
    model = Net(drop).cuda().train()
    # Two shapes in turn, so that graphs and their gradients are switched.
    batches = [inputs(seed, 8 if seed % 3 else 5, 6).to(GPU) for seed in range(9)]
    torch.manual_seed(1)
    eager = training_job(model, optimizer).finish()
    expected = [(eager(b), {n: g.clone() for n, g in eager.gradients().items()}) for b in batches]
    torch.manual_seed(1)
    plan, job = Plan.parse("cuda_graph").build(training_job(model, optimizer), Machine.detect("cuda"))
    step = job.finish()
    for index, batch in enumerate(batches):
        loss, gradients = step(batch), step.gradients()
        assert float(loss) == pytest.approx(float(expected[index][0]), rel=1e-4), index
        names = list(gradients)
        assert relative_error([expected[index][1][n] for n in names], [gradients[n] for n in names]) < 1e-3, index
    assert relative_error(list(eager.model.state_dict().values()), list(step.model.state_dict().values())) < 1e-4
    assert plan.rungs[0].proof(job).startswith("2 graphs captured, 7 replays")


class Littering(nn.Linear):
    """Forgets a graph in a ring of references while another one is recorded, and then the collector's turn comes."""

    def __init__(self, size: int) -> None:
        super().__init__(size, size)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            torch.zeros(8, device=GPU)
        self.ring: list[object] = [graph]
        self.ring.append(self.ring)

    def forward(self, input: Tensor) -> Tensor:
        if torch.cuda.is_current_stream_capturing():
            self.ring = []
            if gc.isenabled():
                gc.collect()
        return super().forward(input)


@pytest.mark.gpu
def test_on_cuda_a_forgotten_graph_is_not_taken_down_during_a_recording() -> None:
    model, x = Littering(64).eval().cuda(), inputs(0, 4, 64).to(GPU)
    graphed = GraphedCallable(model, CudaGraphCapturer(torch.device(GPU)), CaptureCounts())
    with torch.no_grad():
        assert relative_error(model(x), graphed(x)) < 1e-6
    assert not model.ring


@pytest.mark.gpu
def test_on_cuda_a_recording_has_scratch_memory_of_its_own() -> None:
    """As after inductor's graphs: what cuBLAS had for scratch is dropped, and its place goes to others' numbers."""
    recorder = CudaGraphCapturer(torch.device(GPU))
    # So deep that parts of a sum are added up by way of scratch memory.
    left, right = (torch.randn(shape, device=GPU, dtype=torch.bfloat16) for shape in ((64, 65536), (65536, 64)))
    expected = recorder.warm_up(lambda: left @ right)
    output, replay = recorder.capture(lambda: left @ right)
    torch._C._cuda_clearCublasWorkspaces()
    with torch.cuda.stream(recorder.stream):
        others = [torch.ones(2**20, device=GPU) for _ in range(64)]
    torch.cuda.synchronize()
    for _ in range(3):
        replay()
    torch.cuda.synchronize()
    assert all(bool((other == 1).all()) for other in others)
    assert relative_error(expected, output) < 1e-2


@pytest.mark.gpu
def test_on_cuda_a_scheduler_is_followed() -> None:
    torch.manual_seed(0)
    model = Net().cuda().train()
    losses = []
    for plan in ("eager", "cuda_graph"):
        _, job = Plan.parse(plan).build(training_job(model, "adamw"), Machine.detect("cuda"))
        step = job.finish()
        schedule = torch.optim.lr_scheduler.StepLR(step.optimizer, 1, gamma=0.3)
        seen = []
        for seed in range(6):
            seen.append(float(step(inputs(seed, 8, 6).to(GPU))))
            schedule.step()
        losses.append(seen)
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert job.evidence["cuda_graph"].graphs == 1


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("plan", ["bf16 + cuda_graph", "autocast + cuda_graph", "compile + cuda_graph"])
def test_on_cuda_with_other_rungs(plan: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).eval().cuda()
    samples = (inputs(0, 16, 64).to(GPU),)
    _, job = Plan.parse(plan).build(Job.of(model, samples), Machine.detect("cuda"))
    run = job.finish()
    for seed in range(4):
        x = inputs(seed, 16, 64).to(GPU)
        # Two layers in bf16, each rounding at 2^-9 several times.
        assert relative_error([model(x)], [run(x)]) < 2e-2


@pytest.mark.gpu
def test_on_cuda_a_call_that_waits_for_the_gpu_is_refused() -> None:
    class Waits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight if float(x.sum()) > 0 else x

    _, job = Plan.parse("cuda_graph").build(Job.of(Waits().cuda()), Machine.detect("cuda"))
    with pytest.raises(RungError, match="cannot be captured"):
        job.finish()(inputs(0).to(GPU))
    # Random numbers can still be drawn, and no stream is left in a recording.
    assert torch.isfinite(torch.randn(8, device=GPU)).all()
    torch.cuda.synchronize()

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from redline.errors import RungError
from redline.ladder.gate import Gate
from redline.ladder.job import Job
from redline.ladder.metrics import relative_error
from redline.ladder.plan import Plan, Unavailable
from redline.ladder.rungs.streams import Pipeline, Streams
from redline.machine.machine import Machine
from redline.machine.pinned_copies import PlainCopies

CPU = Machine.detect("cpu")
CUDA = replace(CPU, device="cuda:0")


class Net(nn.Module):
    """Two inputs, a nested output, batch norm in the way."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 6), nn.BatchNorm1d(6)
        self.sizes: list[int] = []

    def forward(self, x: Tensor, t: Tensor) -> dict[str, Any]:
        self.sizes.append(len(x))
        y = self.norm(self.linear(x)) + t[:, None]
        return {"y": y, "parts": (y[:, :2].argmax(-1), "label")}


def inputs(seed: int, rows: int = 10) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 4, generator=generator), torch.randn(rows, generator=generator)


def pipeline(function: Any, chunks: int) -> Pipeline:
    return Pipeline(function, PlainCopies(torch.device("cpu")), chunks, {})


@pytest.mark.parametrize(
    "rows,chunks,sizes",
    [(10, 4, [3, 3, 2, 2]), (4, 4, [1, 1, 1, 1]), (3, 4, [3]), (10, 1, [10]), (1, 2, [1])],
)
def test_cut_batches_give_what_whole_ones_give(rows: int, chunks: int, sizes: list[int]) -> None:
    torch.manual_seed(0)
    model = Net().eval()
    expected = model(*inputs(1, rows))
    model.sizes.clear()
    with torch.no_grad():
        seen = pipeline(model, chunks)(*inputs(1, rows))
    assert model.sizes == sizes
    assert torch.allclose(seen["y"], expected["y"], rtol=1e-5, atol=1e-6)
    assert torch.equal(seen["parts"][0], expected["parts"][0])
    assert seen["parts"][1] == "label"


def test_inputs_by_name_and_values_that_are_no_tensors() -> None:
    run = pipeline(lambda x, by=1.0, more=None: x * by + more["y"], 3)
    x, y = inputs(0)[0], inputs(1)[0]
    assert torch.equal(run(x, by=2.0, more={"y": y}), x * 2 + y)


@pytest.mark.parametrize("other", [torch.randn(3), torch.tensor(2.0)])
def test_inputs_that_do_not_share_the_first_axis_run_whole(other: Tensor) -> None:
    calls = []

    def function(x: Tensor, other: Tensor) -> Tensor:
        calls.append(x.shape[0])
        return x.sum() + other

    x = inputs(0)[0]
    assert torch.equal(pipeline(function, 4)(x, other), x.sum() + other)
    assert calls == [10]


def test_results_stay_what_they_were() -> None:
    run = pipeline(lambda x: x + 1, 2)
    first = run(inputs(0)[0])
    run(inputs(1)[0])
    assert torch.equal(first, inputs(0)[0] + 1)


def test_an_output_without_rows_is_refused() -> None:
    with pytest.raises(RungError, match="does not have one row per input row"):
        pipeline(lambda x: x.mean(), 2)(inputs(0)[0])


def host_job(model: nn.Module, sample: Any, **more: Any) -> Job:
    return Job.of(model, (sample,), host_inputs=True, **more)


def test_the_rung_takes_the_plain_copies_place_and_proves_it() -> None:
    torch.manual_seed(0)
    model = Net().eval()
    state = {name: t.clone() for name, t in model.state_dict().items()}
    plan, job = Plan.parse("streams(chunks=4)").build(host_job(model, inputs(0)), CUDA)
    assert not job.host_inputs
    run = job.finish()
    assert plan.rungs[0].proof(job) == ""
    for seed in range(3):
        expected = model(*inputs(seed))["y"]
        assert relative_error([expected], [run(*inputs(seed))["y"]]) < 1e-6
    assert plan.rungs[0].proof(job) == "3 calls copied in and out on separate streams, in 4 chunks each"
    assert all(torch.equal(model.state_dict()[k], v) for k, v in state.items())


class Centred(nn.Module):
    """Rows look at each other, so that a cut batch is another one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x - x.mean(0))


class OneSize(Centred):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.reshape(10, 4))


@pytest.mark.parametrize(
    "model,reason", [(Centred(), "changes the output"), (OneSize(), "does not accept a split batch")]
)
def test_a_model_whose_rows_depend_on_each_other_is_refused(model: nn.Module, reason: str) -> None:
    x = inputs(0)[0] + torch.arange(10)[:, None]
    with pytest.raises(RungError, match=reason):
        Streams().apply(host_job(model.eval(), x, gates=(Gate("relative_error", 0.02),)))
    run = Streams(chunks=1).apply(host_job(model, x)).finish()
    assert torch.equal(run(x), model(x))


def test_reasons_why_not() -> None:
    assert "CUDA GPU" in Streams().why_not(CPU)
    assert Streams().why_not(CUDA) == ""
    assert "already on the GPU" in Streams().why_not(CUDA, Job.of(Net()))
    assert Streams().why_not(CUDA, host_job(Net(), inputs(0))) == ""
    with pytest.raises(Unavailable, match="CUDA GPU"):
        Plan.parse("streams").build(host_job(Net(), inputs(0)), CPU)
    with pytest.raises(RungError, match="at least 1"):
        Streams(chunks=0)


def test_plan_round_trip() -> None:
    plan = Plan((Streams(chunks=8, depth=3),))
    assert Plan.parse(str(plan)) == plan


class Sleepy(nn.Module):
    """Takes a random time on the GPU, before and after the work, so that a missing wait shows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(256, 256)

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda:
            torch.cuda._sleep(int(torch.randint(1, 3_000_000, ())))
        y = self.linear(x)
        if x.is_cuda:
            torch.cuda._sleep(int(torch.randint(1, 3_000_000, ())))
        return torch.tanh(y) * 2


@pytest.mark.gpu
@pytest.mark.parametrize("chunks,depth", [(1, 1), (4, 1), (4, 2), (5, 3)])
@pytest.mark.parametrize("pinned", [False, True])
def test_on_cuda_whatever_the_timing(chunks: int, depth: int, pinned: bool) -> None:
    torch.manual_seed(0)
    model = Sleepy().eval().cuda()
    reference = Sleepy().eval()
    reference.load_state_dict(model.state_dict())

    def batch(seed: int, rows: int) -> Tensor:
        x = torch.randn(rows, 256, generator=torch.Generator().manual_seed(seed))
        return x.pin_memory() if pinned else x

    plan, job = Plan((Streams(chunks=chunks, depth=depth),)).build(
        host_job(model, batch(0, 64)), Machine.detect("cuda")
    )
    run = job.finish()
    seen, expected = [], []
    # Sizes grow, shrink and do not divide, so that buffers are made again while work is in flight.
    for seed, rows in enumerate((64, 37, 1000, 64, 3, 1001, 64, 500)):
        x = batch(seed, rows)
        seen.append(run(x))
        x.fill_(float("nan"))  # a finished call has no more need of its input
        expected.append(reference(batch(seed, rows)))
        assert seen[-1].device.type == "cpu" and seen[-1].shape == expected[-1].shape
        assert relative_error([expected[-1]], [seen[-1]]) < 1e-5
    # And earlier results were not overwritten by later calls.
    assert relative_error(expected, seen) < 1e-5
    assert plan.rungs[0].proof(job)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("plan", ["bf16 + streams", "compile(mode=reduce-overhead) + streams", "compile + streams"])
def test_on_cuda_with_other_rungs(plan: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).eval().cuda()
    x = torch.randn(32, 64)
    _, job = Plan.parse(plan).build(host_job(model, x), Machine.detect("cuda"))
    run = job.finish()
    for seed in range(4):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            expected = model(x.cuda()).cpu()
        # Two layers in bf16 at worst.
        assert relative_error([expected], [run(x)]) < 2e-2

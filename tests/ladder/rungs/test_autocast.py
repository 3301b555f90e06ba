from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from redline.ladder.job import Job
from redline.ladder.metrics import relative_error
from redline.ladder.plan import Plan
from redline.ladder.rungs.autocast import Autocast
from redline.machine.machine import Machine

pytestmark = pytest.mark.cpu

CPU = Machine.detect("cpu")
FAST = replace(CPU, hardware_dtypes=("fp32", "fp16", "bf16"), ceilings=None)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 2)
        self.unused = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.norm(self.conv(x)).mean((2, 3))
        return self.head(x), x.argmax(-1)


def picture(seed: int) -> Tensor:
    return torch.randn(2, 3, 5, 6, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("dtype", "bits"), [("bf16", 8), ("fp16", 11)])
def test_output_is_fp32_and_close_to_fp64(dtype: str, bits: int) -> None:
    torch.manual_seed(0)
    model = Net().eval()
    fast = Autocast(dtype).apply(Job.of(model, (picture(0),))).finish()
    seen, _ = fast(picture(1))
    expected, _ = model.double()(picture(1).double())
    assert seen.dtype == torch.float32
    # Inputs, weights and outputs of two layers rounded.
    assert relative_error([expected], [seen]) < 8 * 2**-bits


def test_layers_compute_in_the_low_precision() -> None:
    torch.manual_seed(0)
    model = Net().eval()
    fast = Autocast().apply(Job.of(model, (picture(0),))).finish()
    assert not torch.equal(fast(picture(1))[0], model(picture(1))[0])


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_proof_counts_the_layers_that_were_called_and_cast(dtype: str) -> None:
    rung = Autocast(dtype)
    job = rung.apply(Job.of(Net().eval(), (picture(0),)))
    assert rung.proof(job) == f"2 of 2 Linear and convolution layers ran in {dtype}"
    assert not any(m._forward_hooks for m in job.model.modules())


def test_proof_is_empty_if_no_layer_ran_in_low_precision() -> None:
    class Guarded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                return self.linear(x)

    job = Autocast().apply(Job.of(Guarded(), (torch.randn(2, 4),)))
    assert Autocast().proof(job) == ""


def test_proof_without_a_sample_is_not_verified() -> None:
    job = Autocast().apply(Job.of(Net().eval()))
    assert "no sample" in Autocast().proof(job)
    assert Autocast().proof(Autocast().apply(Job.of(nn.ReLU()))) == ""


def test_model_and_random_state_are_unchanged() -> None:
    model = Net().train()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    state = torch.get_rng_state()
    job = Autocast().apply(Job.of(model, (picture(0),), share=True))
    assert torch.equal(torch.get_rng_state(), state)
    # The look at a sample in training mode has not moved the statistics.
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    job.finish()(picture(0))
    assert not torch.is_autocast_enabled("cpu")
    assert torch.get_autocast_dtype("cpu") == torch.bfloat16


def test_the_users_model_is_left_alone() -> None:
    model = Net().eval()
    before, shape = {name: t.clone() for name, t in model.state_dict().items()}, str(model)
    Autocast().apply(Job.of(model, (picture(0),))).finish()(picture(0))
    assert str(model) == shape
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


def test_why_not_and_variants() -> None:
    assert "layer to cast" in Autocast().why_not(FAST, Job.of(nn.ReLU()))
    assert Autocast().why_not(FAST, Job.of(Net())) == ""
    only_fp16 = replace(CPU, hardware_dtypes=("fp32", "fp16"), ceilings=None)
    assert "bf16" in Autocast().why_not(only_fp16)
    assert Autocast.variants(only_fp16) == (Autocast("fp16"),)
    assert Autocast.variants(FAST) == (Autocast("bf16"),)


def test_training_step_keeps_fp32_weights_and_gradients() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    job = Job.of(
        model,
        (torch.randn(8, 4),),
        loss=lambda y, batch: (y**2).mean(),
        optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1),
    )
    step = Autocast().apply(job).finish()
    batch = torch.randn(8, 4)
    losses = [float(step(batch)) for _ in range(5)]
    assert losses[-1] < losses[0]
    assert {g.dtype for g in step.gradients().values()} == {torch.float32}


def test_one_graph_under_a_compiler() -> None:
    torch.manual_seed(0)
    job = Autocast().apply(Job.of(Net().eval(), (picture(0),)))
    with torch.no_grad():
        compiled = torch.compile(job.model, backend="eager", fullgraph=True)
        assert torch.equal(compiled(picture(1))[0], job.model(picture(1))[0])
    torch._dynamo.reset()


def test_plan_round_trip() -> None:
    assert Plan.parse("autocast(dtype=fp16)") == Plan((Autocast("fp16"),))
    assert str(Plan((Autocast("fp16"),))) == "autocast(dtype=fp16)"


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "bits"), [("bf16", 8), ("fp16", 11)])
def test_on_cuda(dtype: str, bits: int) -> None:
    torch.manual_seed(0)
    model = Net().eval()
    expected, _ = model.double()(picture(1).double())
    model.float().cuda()
    rung = Autocast(dtype)
    job = rung.apply(Job.of(model, (picture(0).cuda(),)))
    seen = job.finish()(picture(1).cuda())[0].cpu()
    assert seen.dtype == torch.float32
    assert relative_error([expected], [seen]) < 8 * 2**-bits
    assert rung.proof(job).startswith("2 of 2")
    assert not torch.is_autocast_enabled("cuda")

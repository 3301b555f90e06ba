"""Half-precision weights with fp32 master weights train as fp32 weights do."""

import pytest
import torch
from torch import Tensor, nn

from redline.ladder.job import Job, TrainingStep
from redline.ladder.plan import Plan
from redline.machine.machine import Machine

CPU = Machine.detect("cpu")
BATCH = (torch.ones(4, 8),)


def stepped(plan: str, master_weights: bool, steps: int = 50) -> TrainingStep:
    """Takes steps of 1e-4, below the bf16 resolution of 4e-3 near 1."""
    model = nn.Linear(8, 8, bias=False)
    nn.init.ones_(model.weight)

    def loss(output: Tensor, _: object) -> Tensor:
        return output.mean() * 8

    job = Job.of(
        model,
        (BATCH,),
        loss=loss,
        optimizer=lambda weights: torch.optim.SGD(weights, 1e-4),
        master_weights=master_weights,
    )
    run = Plan.parse(plan).build(job, CPU)[1].finish()
    assert isinstance(run, TrainingStep)
    for _ in range(steps):
        run(BATCH)
    return run


def weight_of(run: TrainingStep) -> Tensor:
    (weight,) = (tensor for name, tensor in run.job.parameters.items())
    return weight.detach().float()


@pytest.mark.parametrize("plan", ["bf16", "fp16(check=false)", "fp16(check=false) + grad_scaler"])
def test_small_steps_add_up(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Machine, "why_slow", lambda *_: "")
    exact, followed = weight_of(stepped("", False)), weight_of(stepped(plan, True))
    assert (exact - 1).abs().max() > 4e-3
    torch.testing.assert_close(followed, exact, rtol=0, atol=2e-3)  # half of the bf16 resolution below 1
    if plan == "bf16":
        assert (weight_of(stepped(plan, False)) == 1).all()  # without master weights the weight never changes


def test_gradients_are_those_of_the_masters_and_unscaled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Machine, "why_slow", lambda *_: "")
    exact = stepped("", True, 1).gradients()["weight"]
    for plan in ("bf16", "fp16(check=false) + grad_scaler"):
        found = stepped(plan, True, 1).gradients()["weight"]
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, exact, rtol=1e-2, atol=0)


def test_fp32_weights_need_no_master_weights() -> None:
    assert not stepped("", True, 1)._masters

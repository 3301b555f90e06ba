"""Masters in fp32 keep what a low precision loses; a scale adapts, and gives up aloud."""

import pytest
import torch
from torch import nn

from redline.training.arithmetic import WorkingCopy


class Counted(nn.Module):
    """Two layers, and a buffer that changes as they run."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 1)
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        self.mean += hidden.detach().mean(0).float()
        return self.last(hidden.tanh())


def pair(precision: str) -> tuple[nn.Module, WorkingCopy, torch.optim.Optimizer]:
    model = Counted()
    return model, WorkingCopy(model, precision), torch.optim.SGD(model.parameters(), 1.0)


def test_steps_too_small_for_bf16_add_up() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    copy, optimizer = WorkingCopy(model, "bf16"), torch.optim.SGD(model.parameters(), 1e-4)
    for _ in range(100):
        copy.backward(copy.model(torch.ones(1, 1, dtype=torch.bfloat16)).sum())
        optimizer.step()
        optimizer.zero_grad()
        copy.publish()
    assert model.weight.item() == pytest.approx(0.99, rel=1e-4)
    assert copy.model.weight.item() == pytest.approx(0.99, rel=4e-3) and copy.model.weight.item() != 1


def test_gradients_add_up_in_fp32_and_buffers_follow() -> None:
    model, copy, _ = pair("bf16")
    assert [b.dtype for b in copy.model.buffers()] == [b.dtype for b in model.buffers()]
    seen = torch.zeros(5, 6)
    for _ in range(7):
        copy.backward(copy.model(torch.randn(9, 6, dtype=torch.bfloat16)).float().square().mean())
        seen = model.first.weight.grad.clone()
        assert seen.dtype == torch.float32 and all(weight.grad is None for weight in copy.model.parameters())
    assert (seen != seen.bfloat16().float()).any()
    copy.publish()
    assert torch.equal(model.mean, copy.model.mean) and model.mean.any()


def test_a_scaled_loss_gives_unscaled_gradients() -> None:
    model, copy, optimizer = pair("fp16")
    points = torch.randn(9, 6)
    exact = Counted()
    exact.load_state_dict(model.state_dict())
    exact(points).square().mean().backward()
    copy.backward(copy.model(points.half()).float().square().mean())
    assert not copy.unscale(optimizer) and copy.scale.current == 4096
    torch.testing.assert_close(model.first.weight.grad, exact.first.weight.grad, rtol=0.05, atol=0.01)


def test_overflow_after_overflow_switches_to_bf16_and_is_remembered() -> None:
    model, copy, optimizer = pair("fp16")

    def step(size: float) -> bool:
        dtype = next(copy.model.parameters()).dtype
        copy.backward(copy.model(torch.randn(9, 6, dtype=dtype)).float().sum() * size)
        lost = copy.unscale(optimizer)
        optimizer.zero_grad()
        copy.publish()
        return lost

    assert step(1e30) and copy.scale.current == 2048 and not step(1.0)
    with pytest.warns(UserWarning, match="5 steps in a row overflowed fp16"):
        assert [step(1e30) for _ in range(5)] == [True] * 5
    assert copy.scale.switched and {w.dtype for w in copy.model.parameters()} == {torch.bfloat16}
    assert not step(1e30)
    other_model, other, _ = pair("fp16")
    other_model.load_state_dict(model.state_dict())
    other.load_state_dict(copy.state_dict())
    assert other.scale.switched and other.scale.skipped == 6
    for one, two in zip(copy.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(one, two) and two.dtype == torch.bfloat16


def test_other_weights_can_be_shown() -> None:
    model, copy, _ = pair("bf16")
    other = Counted()
    copy.show(other)
    assert torch.equal(copy.model.first.weight, other.first.weight.bfloat16())
    copy.publish()
    assert torch.equal(copy.model.first.weight, model.first.weight.bfloat16())

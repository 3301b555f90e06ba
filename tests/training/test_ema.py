"""The average follows the weights by the rule, and starts without a memory of the random ones."""

import torch
from torch import nn

from redline.training.ema import Ema


def test_follows_by_the_rule() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    ema = Ema(model, 0.9)
    expected = [weight.detach().clone() for weight in model.parameters()]
    for step in range(1, 120):
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(torch.randn_like(weight))
            model[1].running_mean.add_(1.0)
        ema.update(step)
        decay = min(0.9, step / (10 + step))
        expected = [
            decay * old + (1 - decay) * new.detach() for old, new in zip(expected, model.parameters(), strict=True)
        ]
    for kept, wanted in zip(ema.model.parameters(), expected, strict=True):
        torch.testing.assert_close(kept, wanted, rtol=1e-4, atol=1e-4)
        assert not kept.requires_grad
    assert torch.equal(ema.model[1].running_mean, model[1].running_mean) and not ema.model.training


def test_without_decay_it_is_the_model() -> None:
    model = nn.Linear(3, 4)
    ema = Ema(model, 0.0)
    nn.init.ones_(model.weight)
    ema.update(1)
    assert torch.equal(ema.model.weight, torch.ones(4, 3))

"""Applies a plan to a training step: the result runs forward, backward and the optimizer in one call."""

import torch
from torch import nn

import redline


def loss(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output, batch.roll(1, dims=1))


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 32))

plan = redline.Plan.parse("fused_optimizer")
step = plan.apply(model, loss=loss, optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2))

losses = [float(step(torch.randn(64, 32))) for _ in range(50)]
print(f"{plan}: loss {losses[0]:.3f} -> {losses[-1]:.3f}")

"""Loads a saved plan, applies it to a model and calls the result like the model."""

from pathlib import Path

import torch
from torch import nn

import redline

model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 8, 3)).eval()
image = torch.randn(1, 3, 64, 64)

plan = redline.Plan.load(Path(__file__).with_name("plan.toml"))
fast = plan.apply(model, samples=image)
output = fast(image)

difference = (output - model(image)).abs().max().item()
print(f"{plan}: output {tuple(output.shape)}, largest difference {difference:.1e}")

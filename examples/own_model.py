"""A model of your own as a workload: `redline climb examples/own_model.py:mine`."""

import torch
from torch import nn

from redline import Workload


def mine(batch: int = 8, width: int = 256) -> Workload:
    return Workload(
        build=lambda: nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.Linear(width, 10)),
        inputs=lambda seed: torch.randn(batch, 64),
        items=batch,
        unit="row",
    )

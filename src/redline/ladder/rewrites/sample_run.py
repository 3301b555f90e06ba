"""Running a model on sample inputs without changing the model."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from redline.ladder.workload import Inputs


def on_device(inputs: Inputs, device: torch.device) -> Inputs:
    """Returns the inputs with all tensors moved to `device`."""
    return pytree.tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, inputs)


@contextmanager
def state_preserved(model: nn.Module) -> Iterator[None]:
    """Restores buffers (such as the statistics of BatchNorm) and the random state on exit."""
    saved = [(buffer, buffer.clone()) for buffer in model.buffers()]
    devices = {p.device.index for p in model.parameters() if p.is_cuda}
    try:
        with torch.random.fork_rng(devices=sorted(d for d in devices if d is not None)):
            yield
    finally:
        with torch.no_grad():
            for buffer, before in saved:
                buffer.copy_(before)

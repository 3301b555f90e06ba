"""Runs a model on sample inputs without changing the model."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from redline.ladder.workload import Inputs


def on_device(inputs: Inputs, device: torch.device) -> Inputs:
    """Returns the inputs with all tensors moved to `device`."""
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), inputs)


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


@contextmanager
def watch_outputs(modules: Mapping[str, nn.Module], note: Callable[[str, Any], object]) -> Iterator[None]:
    """Calls `note(name, output)` after each forward pass of the modules."""
    with ExitStack() as stack:
        for name, module in modules.items():

            def after(_module: nn.Module, _inputs: Any, output: Any, name: str = name) -> None:
                note(name, output)

            stack.callback(module.register_forward_hook(after).remove)
        yield


@contextmanager
def watch_inputs(modules: Mapping[str, nn.Module], note: Callable[[str, Any, Any], object]) -> Iterator[None]:
    """Calls `note(name, args, kwargs)` before each forward pass of the modules."""
    with ExitStack() as stack:
        for name, module in modules.items():

            def before(_module: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
                note(name, args, kwargs)

            stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
        yield

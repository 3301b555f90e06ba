"""Runs a model on sample inputs without changing the model."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from redline.ladder.workload import Inputs
from redline.machine.trees import tree_map_only


def on_device(inputs: Inputs, device: torch.device) -> Inputs:
    """Returns the inputs with all tensors moved to `device`."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), inputs)


@contextmanager
def state_preserved(model: nn.Module) -> Iterator[None]:
    """Restores buffers (such as the statistics of BatchNorm), other attributes and the random state on exit."""
    base = vars(nn.Module()).keys()
    modules = [(vars(m), {k: v for k, v in vars(m).items() if k not in base}) for m in model.modules()]
    # A module may also assign a new tensor to a buffer; then the old tensor has to be put back.
    buffers = [(m._buffers, dict(m._buffers)) for m in model.modules()]
    values = [value for _, attributes in modules for value in attributes.values()]
    saved = [(tensor, tensor.detach().clone()) for tensor in [*model.buffers(), *values] if isinstance(tensor, Tensor)]
    filled = [(value, value.copy()) for value in values if isinstance(value, (list, dict, set))]
    devices = {p.device.index for p in model.parameters() if p.is_cuda}
    try:
        with torch.random.fork_rng(devices=sorted(d for d in devices if d is not None)):
            yield
    finally:
        for own, before in modules:
            for key in own.keys() - before.keys() - base:
                del own[key]
            own.update({key: value for key, value in before.items() if key in own})
        for own, before in buffers:
            own.update(before)
        for value, before in filled:
            value.clear()
            value.extend(before) if isinstance(value, list) else value.update(before)
        with torch.no_grad():
            for tensor, before in saved:
                if not torch.equal(tensor, before):  # an expanded tensor cannot be written to
                    tensor.copy_(before)


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

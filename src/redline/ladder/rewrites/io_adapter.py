"""Wraps a model in a module that converts inputs and outputs."""

from typing import Any

import torch
from torch import Tensor, nn

from redline.machine.trees import tree_map, tree_map_only


class Boundary(nn.Module):
    """Converts floating-point inputs to `dtype` (and `memory_format`) and outputs of that dtype to fp32."""

    def __init__(
        self, model: nn.Module, dtype: torch.dtype | None = None, memory_format: torch.memory_format | None = None
    ) -> None:
        super().__init__()
        self.model = model
        self.dtype = dtype
        self.memory_format = memory_format

    def _enter(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            if self.dtype is not None and leaf.dtype != self.dtype and leaf.is_floating_point():
                leaf = leaf.to(self.dtype)
            layout = self.memory_format
            if layout is not None and leaf.dim() == 4 and not leaf.is_contiguous(memory_format=layout):
                leaf = leaf.contiguous(memory_format=layout)
        return leaf

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs or any(isinstance(arg, (tuple, list, dict)) for arg in args):
            args, kwargs = tree_map(self._enter, (args, kwargs))
        else:
            args = tuple([self._enter(arg) for arg in args])
        output = self.model(*args, **kwargs)
        if self.dtype is None:
            return output
        return tree_map_only(Tensor, lambda leaf: leaf.float() if leaf.dtype == self.dtype else leaf, output)


def unwrapped(model: nn.Module) -> nn.Module:
    """Returns the user's model without the modules that rungs have wrapped around it as `.model`."""
    while type(model).__module__.startswith(("redline.ladder.rewrites.io_adapter", "redline.ladder.rungs.")):
        inner = getattr(model, "model", None)
        if not isinstance(inner, nn.Module):
            break
        model = inner
    return model

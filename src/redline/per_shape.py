"""A model compiled ahead of time for fixed input shapes: one engine per form of input, built on first need."""

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor, nn
from torch.utils import _pytree as pytree


class Engine(Protocol):
    """A compiled model for one form of input."""

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...


Build = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Engine]


class PerShape(nn.Module):
    """Called like the model. The model itself is kept, to build an engine when a new shape arrives."""

    def __init__(self, model: nn.Module, build: Build) -> None:
        super().__init__()
        self.model = model
        self._build = build
        self.engines: dict[Any, Engine] = {}

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Engine:
        """The engine for inputs of this form."""
        key = input_form(args, kwargs)
        if key not in self.engines:
            self.engines[key] = self._build(self.model, args, kwargs)
        return self.engines[key]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.prepare(args, kwargs)(args, kwargs)


def input_form(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an engine is specialized to: shapes and dtypes of tensors, and the values of everything else."""
    if not kwargs and all(isinstance(a, Tensor) for a in args):
        return tuple((a.shape, a.dtype) for a in args)
    leaves, structure = pytree.tree_flatten((args, dict(sorted(kwargs.items()))))
    form = tuple((x.shape, x.dtype) if isinstance(x, Tensor) else repr(x) for x in leaves)
    return form, str(structure)

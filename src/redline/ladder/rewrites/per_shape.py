"""Compiles a model ahead of time for fixed shapes: one engine per input form, built at the first call.

An input form is the combination of tensor shapes, dtypes and non-tensor values. Engines accept only tensors, so
`FlatModel` presents the model as a function from a list of tensors to a list of tensors. Non-tensor values are fixed
when the engine is built and restored around each call.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from redline.errors import RungError
from redline.ladder.gate import tensors_of
from redline.ladder.rewrites.sample_run import on_device
from redline.machine.trees import tree_flatten, tree_leaves, tree_unflatten

# A compiled model for one input form; called with (args, kwargs).
E = TypeVar("E", bound=Callable[[tuple[Any, ...], dict[str, Any]], Any])


class PerShape(nn.Module, Generic[E]):
    """A module that is called like the model, and runs the engine for the input form of the call."""

    def __init__(self, model: nn.Module, build: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], E]) -> None:
        super().__init__()
        self.model = model
        self._build = build
        self.engines: dict[Any, E] = {}

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> E:
        """Returns the engine for inputs of this form; builds it if necessary."""
        key = input_form(args, kwargs)
        engine = self.engines.get(key)
        if engine is None:
            engine = self.engines[key] = self._build(self.model, args, kwargs)
        return engine

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.prepare(args, kwargs)(args, kwargs)


def input_form(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Returns a key for the input form: shapes and dtypes of tensors, and all other values."""
    if not kwargs and all(isinstance(a, Tensor) for a in args):
        return tuple((a.shape, a.dtype) for a in args)
    leaves, structure = tree_flatten(_in_order(args, kwargs))
    form = tuple((x.shape, x.dtype) if isinstance(x, Tensor) else repr(x) for x in leaves)
    return form, str(structure)


def flat_tensors(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Returns the tensors of a call in the order of the engine's inputs."""
    if not kwargs and all(isinstance(a, Tensor) for a in args):
        return list(args)
    return tensors_of(_in_order(args, kwargs))


def as_call(batch: Any, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the batch of a workload as (args, kwargs) on the device of the model."""
    batch = on_device(batch, device)
    if isinstance(batch, dict):
        return (), batch
    return (tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)), {}


def _in_order(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return args, dict(sorted(kwargs.items()))


class FlatModel(nn.Module):
    """The model as a function of tensors, for one input form. Runs once to find the form of its output."""

    def __init__(self, rung: str, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.model = model
        self._inputs = _Form(_in_order(args, kwargs))
        if not self._inputs.places:
            raise RungError(f"{rung}: the model gets no tensor as input, so it cannot be compiled.")
        with torch.no_grad():
            output = model(*args, **kwargs)
        self._single = isinstance(output, Tensor)
        self._outputs = _Form(output)
        if not self._outputs.places:
            raise RungError(f"{rung}: the output of the model, a {type(output).__name__}, contains no tensor.")
        # Shape and dtype of every output tensor.
        self.output_forms = [(tensor.shape, tensor.dtype) for tensor in tensors_of(output)]

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        args, kwargs = self._inputs.filled(tensors)
        output = tree_leaves(self.model(*args, **kwargs))
        return tuple(output[i] for i in self._outputs.places)

    def restore(self, results: Sequence[Tensor]) -> Any:
        """Returns the results of an engine in the structure of the model's output."""
        return results[0] if self._single else self._outputs.filled(results)


class _Form:
    """The structure of nested values. `filled` returns the same nested values with other tensors."""

    def __init__(self, values: Any) -> None:
        leaves, self.structure = tree_flatten(values)
        self.constants = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def filled(self, tensors: Sequence[Tensor]) -> Any:
        leaves = list(self.constants)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        return tree_unflatten(leaves, self.structure)

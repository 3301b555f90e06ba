"""Compiles a model ahead of time for fixed shapes: one engine per input form, built at the first call.

An input form is the combination of tensor shapes, dtypes and non-tensor values. Engines accept only tensors, so
`FlatModel` presents the model as a function from a list of tensors to a list of tensors. Non-tensor values are fixed
when the engine is built and restored around each call.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from redline.errors import RungError
from redline.ladder.rewrites.sample_run import on_device


class Engine(Protocol):
    """A compiled model for one input form."""

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...


E = TypeVar("E", bound=Engine)


class PerShape(nn.Module, Generic[E]):
    """A module that is called like the model and runs the engine of the input form."""

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
    leaves, structure = pytree.tree_flatten(_in_order(args, kwargs))
    form = tuple((x.shape, x.dtype) if isinstance(x, Tensor) else repr(x) for x in leaves)
    return form, str(structure)


def flat_tensors(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Returns the tensors of a call in the order of the engine's inputs."""
    if not kwargs and all(isinstance(a, Tensor) for a in args):
        return list(args)
    return [leaf for leaf in pytree.tree_leaves(_in_order(args, kwargs)) if isinstance(leaf, Tensor)]


def as_call(batch: Any, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the batch of a workload as (args, kwargs) on the device of the model."""
    batch = on_device(batch, device)
    if isinstance(batch, dict):
        return (), batch
    return (tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)), {}


def _in_order(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return args, dict(sorted(kwargs.items()))


class FlatModel(nn.Module):
    """The model for one input form, as a function of tensors; runs once to determine the form of its output."""

    def __init__(self, rung: str, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.model = model
        leaves, self._structure = pytree.tree_flatten(_in_order(args, kwargs))
        self._constants = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        if not self._places:
            raise RungError(f"{rung}: the model gets no tensor as input, so it cannot be compiled.")
        with torch.no_grad():
            output = model(*args, **kwargs)
        self._single = isinstance(output, Tensor)
        results, self._output_structure = pytree.tree_flatten(output)
        self._output_constants = [None if isinstance(leaf, Tensor) else leaf for leaf in results]
        self._output_places = [i for i, leaf in enumerate(results) if isinstance(leaf, Tensor)]
        if not self._output_places:
            raise RungError(f"{rung}: the output of the model, a {type(output).__name__}, contains no tensor.")
        # Shape and dtype of every output tensor.
        self.output_forms = [(results[i].shape, results[i].dtype) for i in self._output_places]

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        leaves = _filled(self._constants, self._places, tensors)
        args, kwargs = pytree.tree_unflatten(leaves, self._structure)
        output = pytree.tree_leaves(self.model(*args, **kwargs))
        return tuple(output[i] for i in self._output_places)

    def restore(self, results: Sequence[Tensor]) -> Any:
        """Returns the results of an engine in the form that the model returns."""
        if self._single:
            return results[0]
        leaves = _filled(self._output_constants, self._output_places, results)
        return pytree.tree_unflatten(leaves, self._output_structure)


def _filled(constants: Sequence[Any], places: Sequence[int], tensors: Sequence[Tensor]) -> list[Any]:
    leaves = list(constants)
    for place, tensor in zip(places, tensors, strict=True):
        leaves[place] = tensor
    return leaves

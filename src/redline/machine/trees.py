"""Flattens and rebuilds nested values like `torch.utils._pytree`, including dataclasses and subclasses of dict.

The classes of such objects are registered with torch on first use, so torch.export and CUDA graphs support them too.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree


def tree_flatten(value: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """Returns the leaves and the structure of a value, from which `tree_unflatten` restores the value."""
    leaves, structure = pytree.tree_flatten(value)
    # While torch.compile traces this function, nothing is registered: an earlier call registered every class.
    if torch.compiler.is_compiling() or not sum(_register(kind) for kind in {type(leaf) for leaf in leaves}):
        return leaves, structure
    return tree_flatten(value)


def tree_unflatten(leaves: list[Any], structure: pytree.TreeSpec) -> Any:
    return pytree.tree_unflatten(leaves, structure)


def tree_leaves(value: Any) -> list[Any]:
    return tree_flatten(value)[0]


def tree_map(function: Callable[[Any], Any], value: Any) -> Any:
    leaves, structure = tree_flatten(value)
    return tree_unflatten([function(leaf) for leaf in leaves], structure)


def tree_map_only(kind: type, function: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, kind):  # flattening it would cost microseconds
        return function(value)
    return tree_map(lambda leaf: function(leaf) if isinstance(leaf, kind) else leaf, value)


def _register(kind: type) -> bool:
    """Registers a class with torch if its objects contain other values; returns whether it did."""
    if kind in pytree.SUPPORTED_NODES or issubclass(kind, nn.Module):
        return False
    if dataclasses.is_dataclass(kind):
        names = [field.name for field in dataclasses.fields(kind)]

        def take_apart(value: Any) -> tuple[list[Any], tuple[str, ...]]:
            present = tuple(name for name in names if hasattr(value, name))
            return [getattr(value, name) for name in present], present

        # Sets the fields directly, because __init__ and __post_init__ may take other arguments or convert them.
        def put_together(values: Any, present: Any) -> Any:
            made = object.__new__(kind)
            for name, value in zip(present, values, strict=True):
                object.__setattr__(made, name, value)
            return made

        pytree.register_pytree_node(kind, take_apart, put_together)
        return True
    if issubclass(kind, dict):
        pytree.register_pytree_node(
            kind,
            lambda mapping: (list(mapping.values()), tuple(mapping)),
            lambda values, keys: kind(zip(keys, values, strict=True)),
        )
        return True
    return False

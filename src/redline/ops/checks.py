"""Checks of the arguments of ops. Each raises a ModelError that names the op, the argument, and what it received."""

from collections.abc import Sequence

import torch
from torch import Tensor

from redline.errors import ModelError


def check_shape(op: str, name: str, tensor: Tensor, expected: Sequence[int]) -> None:
    if tuple(tensor.shape) != tuple(expected):
        raise ModelError(f"{op}: {name} must have shape {tuple(expected)}, not {tuple(tensor.shape)}.")


def check_sizes(op: str, **tensors: Tensor | None) -> dict[str, int]:
    """Checks tensors whose names end in one letter or digit per dimension, such as q_BSHK, and returns the sizes.

    Dimensions with the same letter must have the same size in all tensors, and a digit is the required size.
    """
    sizes: dict[str, int] = {digit: int(digit) for digit in "23"}
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        letters = name[name.rfind("_") + 1 :]
        expected = [sizes.get(letter, letter) for letter in letters]
        if len(letters) != tensor.ndim or any(
            sizes.setdefault(letter, size) != size for letter, size in zip(letters, tensor.shape, strict=True)
        ):
            shape = f"({', '.join(map(str, expected))}{',' * (len(expected) == 1)})"
            raise ModelError(f"{op}: {name} must have shape {shape}, not {tuple(tensor.shape)}.")
    return sizes


def check_floating(op: str, **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_floating_point():
            raise ModelError(f"{op}: {name} must be floating-point, not {tensor.dtype}.")


def check_integers(op: str, name: str, tensor: Tensor, expected: Sequence[int]) -> None:
    """Requires an int32 or int64 tensor of this shape."""
    check_shape(op, name, tensor, expected)
    check_integer(op, name, tensor)


def check_integer(op: str, name: str, tensor: Tensor) -> None:
    if tensor.dtype not in (torch.int32, torch.int64):
        raise ModelError(f"{op}: {name} must be int32 or int64, not {tensor.dtype}.")


def check_same_dtype(op: str, **tensors: Tensor | None) -> None:
    """Raises if a tensor has another dtype than the first one."""
    (first, like), *others = tensors.items()
    for name, tensor in others:
        if tensor is not None and like is not None and tensor.dtype != like.dtype:
            raise ModelError(f"{op}: {name} is {tensor.dtype}, but {first} is {like.dtype}. They must be the same.")


def check_same_device(op: str, **tensors: Tensor | None) -> None:
    """Raises if a tensor is on another device than the first one."""
    (first, like), *others = tensors.items()
    for name, tensor in others:
        if tensor is not None and like is not None and tensor.device != like.device:
            raise ModelError(f"{op}: {name} is on {tensor.device}, but {first} is on {like.device}.")


def check_no_gradient(op: str, **tensors: Tensor | None) -> None:
    """Raises if an argument of an op without a backward pass needs a gradient."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.requires_grad and torch.is_grad_enabled():
            raise ModelError(f"{op}: {name} requires grad, but the op has no gradient. Call it under torch.no_grad().")


def check_memory_inputs(
    op: str, q_BSHK: Tensor, documents_BS: Tensor | None, chunk: int, **tensors: Tensor | None
) -> None:
    """Checks the arguments of the recurrent memory ops."""
    if not check_sizes(op, q_BSHK=q_BSHK, **tensors, documents_BS=documents_BS)["S"]:
        raise ModelError(f"{op}: q_BSHK must have at least one token, not {tuple(q_BSHK.shape)}.")
    if documents_BS is not None:
        check_integer(op, "documents_BS", documents_BS)
    if chunk < 1:
        raise ModelError(f"{op}: chunk must be at least 1, not {chunk}.")

"""Builds modules on the meta device, where they allocate nothing, and allocates their tensors later.

PyTorch implements some operations of the meta device in Python (`normal_`, `empty_like`). The first of them that runs
imports TorchDynamo and SymPy, which takes about two seconds of CPU time. The functions here avoid these operations.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

AnyModule = TypeVar("AnyModule", bound=nn.Module)


class _SkipNormal(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.init.normal_ or func is Tensor.normal_:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


@contextmanager
def meta_device() -> Iterator[None]:
    """Like `torch.device("meta")`, but random initialization does nothing."""
    with torch.device("meta"), _SkipNormal():
        yield


def allocate(module: AnyModule, device: torch.device | str, dtype: torch.dtype | None = None) -> AnyModule:
    """Replaces a module's meta tensors by uninitialized ones. Floating-point tensors get `dtype` if it is given."""

    def allocated(tensor: Tensor) -> Tensor:
        wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        return torch.empty(tensor.shape, dtype=wanted, device=device)

    return module._apply(allocated)

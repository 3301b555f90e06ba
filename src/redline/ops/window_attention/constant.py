"""Tensors that follow from sizes alone (an index, a mask): made once per size and device, and kept.

A plain `lru_cache` would keep what one call's surroundings made of the tensor: an inference tensor that no later
backward may save, a stand-in without values from a tracer, memory that belongs to a CUDA graph under capture, or a
tensor that one stream still fills while another reads it. So what is kept is made outside all of these, and they
make their own.
"""

from collections import OrderedDict
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

import torch
from torch import Tensor

P = ParamSpec("P")

_KEPT_AT_MOST = 16


def constant(build: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """Keeps what `build` gives for the same arguments; those that were not asked for longest go first."""
    kept: OrderedDict[object, Tensor] = OrderedDict()
    # A captured graph reads it for as long as the graph lives, which nobody tells.
    captured: dict[object, Tensor] = {}

    @wraps(build)
    def call(*args: P.args, **kwargs: P.kwargs) -> Tensor:
        if torch.compiler.is_compiling() or _faking():
            return build(*args, **kwargs)
        key = (args, tuple(sorted(kwargs.items())))
        found = captured.get(key, kept.get(key))
        if _capturing():
            if found is None:
                return build(*args, **kwargs)
            captured[key] = found
        elif found is None:
            with torch.inference_mode(False):
                found = build(*args, **kwargs)
            if found.is_cuda:
                torch.cuda.current_stream(found.device).synchronize()
            kept[key] = found
            while len(kept) > _KEPT_AT_MOST:
                kept.popitem(last=False)
        if key in kept:
            kept.move_to_end(key)
        return found

    return call


def _capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _faking() -> bool:
    """Whether tensors that are made here stand for others, as under a tracer."""
    return type(torch.empty(0)) is not Tensor

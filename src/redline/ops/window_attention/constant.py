"""Caches tensors that depend only on sizes and the device, such as an index or a mask.

`lru_cache` would cache tensors that are valid only where they were created: inference tensors, which autograd cannot
save; fake tensors of a compiler; memory of a CUDA graph under capture; or a tensor that one stream is still writing.
Cached tensors are therefore created outside all of these contexts, and calls inside them create their own.
"""

from collections import OrderedDict
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

import torch
from torch import Tensor

P = ParamSpec("P")

_CACHE_SIZE = 16


def constant(build: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """Caches the results of `build` by arguments, and evicts the least recently used."""
    cache: OrderedDict[object, Tensor] = OrderedDict()
    # Tensors that a captured graph reads. They are never evicted, because it is unknown when the graph is deleted.
    captured: dict[object, Tensor] = {}

    @wraps(build)
    def call(*args: P.args, **kwargs: P.kwargs) -> Tensor:
        if torch.compiler.is_compiling() or _is_faking():
            return build(*args, **kwargs)
        key = (args, tuple(sorted(kwargs.items())))
        found = captured.get(key, cache.get(key))
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            if found is None:
                return build(*args, **kwargs)
            captured[key] = found
        elif found is None:
            with torch.inference_mode(False):
                found = build(*args, **kwargs)
            if found.is_cuda:
                torch.cuda.current_stream(found.device).synchronize()
            cache[key] = found
            while len(cache) > _CACHE_SIZE:
                cache.popitem(last=False)
        if key in cache:
            cache.move_to_end(key)
        return found

    return call


def _is_faking() -> bool:
    """Returns whether new tensors are fake tensors, as they are while a compiler traces."""
    return type(torch.empty(0)) is not Tensor

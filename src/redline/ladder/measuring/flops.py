"""Counts floating-point operations with torch's `FlopCounterMode`, extended by operators that it does not support.

The counter supports the attention kernels of GPUs, but not those of the CPU or of Redline. It also cannot see into the
fast path of torch's encoder layers, which runs a whole layer as one operator, so this path is disabled during counting.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count


def _visible_attention(
    query: Any,
    key: Any,
    value: Any,
    lowest: Any,
    far_query: Any = None,
    far_key: Any = None,
    bias: Any = None,
    first: Any = None,
    *_: Any,
    products: int = 2,
    **__: Any,
) -> int:
    """Counts only the keys that each query of Redline's kernel attends to, whereas torch's formulas count all keys."""
    tokens, heads, dim = query.shape
    begin = (lowest if first is None else first).clamp(min=0)
    visible = torch.arange(1, tokens + 1, device=begin.device) - begin
    return 2 * products * heads * dim * int(visible.sum())


def _visible_attention_backward(*given: Any, **__: Any) -> int:
    return _visible_attention(*given, products=5)


# The counter passes shapes to a formula; with this attribute it passes the tensors themselves.
vars(_visible_attention)["_get_raw"] = vars(_visible_attention_backward)["_get_raw"] = True


def _redline_formulas() -> dict[Any, Any]:
    """Returns the FLOP formulas of those Redline operators whose modules have been imported."""
    formulas = {"causal_attention": _visible_attention, "causal_attention_backward": _visible_attention_backward}
    return {getattr(torch.ops.redline, name): formulas[name] for name in formulas if hasattr(torch.ops.redline, name)}


class OperationCounter(TorchDispatchMode):
    """Counts the operators that run, because the time of a compilation grows with their number."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counting_flops(tracker: Any = None) -> Iterator[FlopCounterMode]:
    """Counts FLOPs in the block; `tracker` replaces the counter's own tracker, which assigns operations to modules."""
    aten = torch.ops.aten
    also = {
        aten._scaled_dot_product_flash_attention_for_cpu: lambda *given, **_: sdpa_flop_count(*given[:3]),
        aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda *given, **_: sdpa_backward_flop_count(
            *given[:4]
        ),
    }
    counter = FlopCounterMode(display=False, custom_mapping=also | _redline_formulas())
    if tracker is not None:
        counter.mod_tracker = tracker
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with counter:
            yield counter
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)

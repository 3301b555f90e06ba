"""Counting arithmetic by torch's own counter, which has to be told what it does not know.

It knows the attention kernels of GPUs, not the CPU's, nor our own; and torch's encoder layers take a fast path in
inference, one operation for the whole layer, in which the counter sees nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count


def _cpu_attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(query, key, value)


def _cpu_attention_backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return sdpa_backward_flop_count(grad, query, key, value)


def _seen_attention(
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
    """Of our own, by what is really seen, near or far, where torch's are counted as if everybody saw all."""
    tokens, heads, dim = query.shape
    begin = (lowest if first is None else first).clamp(min=0)
    seen = torch.arange(1, tokens + 1, device=begin.device) - begin
    return 2 * products * heads * dim * int(seen.sum())


def _seen_attention_backward(*given: Any, **__: Any) -> int:
    return _seen_attention(*given, products=5)


# It is told shapes alone unless a formula asks for the tensors.
vars(_seen_attention)["_get_raw"] = vars(_seen_attention_backward)["_get_raw"] = True


def _our_own() -> dict[Any, Any]:
    """Only once they are loaded, which nobody has to do to count."""
    formulas = {"causal_attention": _seen_attention, "causal_attention_backward": _seen_attention_backward}
    return {getattr(torch.ops.redline, name): formulas[name] for name in formulas if hasattr(torch.ops.redline, name)}


@contextmanager
def counting_flops(tracker: Any = None) -> Iterator[FlopCounterMode]:
    """The counter, running; `tracker` says in which module, instead of the counter's own."""
    aten = torch.ops.aten
    also = {
        aten._scaled_dot_product_flash_attention_for_cpu: _cpu_attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _cpu_attention_backward,
    }
    counter = FlopCounterMode(display=False, custom_mapping=also | _our_own())
    if tracker is not None:
        counter.mod_tracker = tracker
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with counter:
            yield counter
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)

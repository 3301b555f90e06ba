"""Counting arithmetic by torch's own counter, which has to be told what it does not know.

It knows the attention kernels of GPUs, not the CPU's; and torch's encoder layers take a fast path in inference, one
operation for the whole layer, in which the counter sees nothing.
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


@contextmanager
def counting_flops(tracker: Any = None) -> Iterator[FlopCounterMode]:
    """The counter, running; `tracker` says in which module, instead of the counter's own."""
    aten = torch.ops.aten
    also = {
        aten._scaled_dot_product_flash_attention_for_cpu: _cpu_attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _cpu_attention_backward,
    }
    counter = FlopCounterMode(display=False, custom_mapping=also)
    if tracker is not None:
        counter.mod_tracker = tracker
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with counter:
            yield counter
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)

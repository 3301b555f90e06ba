"""Activations that are thrown away in the forward pass and computed again in the backward pass.

`selective` keeps the results of the dear operations (products, convolutions, attention, memory) and computes only the
cheap pointwise rest again.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

GRANULARITIES = ("block", "layer", "selective")

# The operations whose results are worth their memory: everything else is pointwise or a small reduction. Our own are
# named as their triton.py registers them, which is not imported here: only a GPU needs it.
EXPENSIVE_OPS = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "linear",
    "_scaled_mm",
    "_int_mm",
    "convolution",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
    "torch_attn::_varlen_attn",
    "flex_attention",
    "redline::causal_attention",
    "redline::gated_delta_rule",
    "redline::titans_memory",
    "redline::window_attention",
    "redline::linear_cross_entropy",
    "redline::linear_cross_entropy_rows",
    "redline::small_matmul",
    "redline::int8_matmul",
    "redline::weight_only_matmul",
)


def checkpointed(function: Callable[..., Any], *args: Any, selective: bool = False) -> Any:
    """The function's result; what it computed on the way is not kept for the gradient."""
    if not torch.is_grad_enabled():
        return function(*args)
    if selective:
        return checkpoint(function, *args, use_reentrant=False, context_fn=_keeping_dear_results)
    return checkpoint(function, *args, use_reentrant=False)


def _keeping_dear_results() -> Any:
    return create_selective_checkpoint_contexts(_policy)


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = operation.name().removeprefix("aten::").partition(".")[0]
    return CheckpointPolicy.MUST_SAVE if name in EXPENSIVE_OPS else CheckpointPolicy.PREFER_RECOMPUTE

"""Activation checkpointing: discards activations in the forward pass and recomputes them in the backward pass.

`selective` saves the results of expensive operations (matrix products, convolutions, attention, neural memory) and
recomputes only the cheap pointwise ones.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

GRANULARITIES = ("block", "layer", "selective")

# Operations whose results are saved; all others are pointwise or small reductions, which are cheap to recompute. The
# ops of redline are listed by name, because they exist only after an import of their triton.py, which only GPUs need.
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
    """Calls the function. Backward recomputes its activations, or with `selective` only those that are cheap."""
    if not torch.is_grad_enabled():
        return function(*args)
    if selective:
        contexts = partial(create_selective_checkpoint_contexts, _policy)
        return checkpoint(function, *args, use_reentrant=False, context_fn=contexts)
    return checkpoint(function, *args, use_reentrant=False)


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = operation.name().removeprefix("aten::").partition(".")[0]
    return CheckpointPolicy.MUST_SAVE if name in EXPENSIVE_OPS else CheckpointPolicy.PREFER_RECOMPUTE

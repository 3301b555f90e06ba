"""Fused ops: each has a reference in plain PyTorch (its specification) and Triton kernels that are faster.

Each op is a package of the same name as its function. The functions are bound here when the package is first imported,
so `from redline.ops import rms_norm` imports the function, even if `redline.ops.rms_norm.triton` was imported before.
Importing this package does not import Triton or initialize CUDA.
"""

from redline.ops.causal_attention import Far, causal_attention
from redline.ops.convolved_heads import convolved_heads
from redline.ops.cross_entropy import cross_entropy
from redline.ops.fused_linear import fused_linear
from redline.ops.fused_mlp import fused_mlp
from redline.ops.gated_delta_rule import gated_delta_rule, gated_delta_step
from redline.ops.int8_matmul import int8_matmul, weight_only_matmul
from redline.ops.layer_norm_dropout_relu import layer_norm_dropout_relu
from redline.ops.linear_cross_entropy import linear_cross_entropy
from redline.ops.memory_step import Learned, Projected, memory_step
from redline.ops.paged_attention import PagedRows, paged_attention
from redline.ops.rms_norm import add_rms_norm, rms_norm
from redline.ops.rope import LinearScaling, Llama3Scaling, rope, rope_tables
from redline.ops.sample import sample
from redline.ops.slot_write import Slots, slot_write
from redline.ops.small_matmul import small_matmul
from redline.ops.swiglu import packed_swiglu, swiglu
from redline.ops.titans_memory import TitansState, titans_memory, titans_step
from redline.ops.window_attention import window_attention, window_attention_expanded

__all__ = [
    "Far",
    "Learned",
    "LinearScaling",
    "Llama3Scaling",
    "PagedRows",
    "Projected",
    "Slots",
    "TitansState",
    "add_rms_norm",
    "causal_attention",
    "convolved_heads",
    "cross_entropy",
    "fused_linear",
    "fused_mlp",
    "gated_delta_rule",
    "gated_delta_step",
    "int8_matmul",
    "layer_norm_dropout_relu",
    "linear_cross_entropy",
    "memory_step",
    "packed_swiglu",
    "paged_attention",
    "rms_norm",
    "rope",
    "rope_tables",
    "sample",
    "slot_write",
    "small_matmul",
    "swiglu",
    "titans_memory",
    "titans_step",
    "weight_only_matmul",
    "window_attention",
    "window_attention_expanded",
]

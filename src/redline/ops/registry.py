"""The list of all operators with Triton kernels: what tests, benchmarks and documentation iterate over.

Every operator takes `implementation`: "auto", "reference" or "triton". Importing this module does not import Triton.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from redline.ops import samples
from redline.ops.causal_attention import causal_attention
from redline.ops.convolved_heads import convolved_heads
from redline.ops.cross_entropy import cross_entropy
from redline.ops.decode_attention import decode_attention
from redline.ops.fused_linear import fused_linear
from redline.ops.fused_mlp import fused_mlp
from redline.ops.gated_delta_rule import gated_delta_rule
from redline.ops.int8_matmul import int8_matmul, weight_only_matmul
from redline.ops.layer_norm_dropout_relu import layer_norm_dropout_relu
from redline.ops.linear_cross_entropy import linear_cross_entropy
from redline.ops.memory_step import memory_step
from redline.ops.rms_norm import add_rms_norm, rms_norm
from redline.ops.rope import rope
from redline.ops.slot_write import slot_write
from redline.ops.small_matmul import small_matmul
from redline.ops.swiglu import packed_swiglu, swiglu
from redline.ops.titans_memory import titans_memory
from redline.ops.window_attention import window_attention, window_attention_expanded

Sizes = dict[str, Any]


@dataclass(frozen=True)
class Op:
    """An operator, small sizes that together launch all of its kernels, and the arguments that get gradients."""

    function: Callable[..., Any]
    sizes: tuple[Sizes, ...] = ({},)
    trained: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.function.__name__

    @property
    def sample(self) -> Callable[..., samples.Arguments]:
        """Makes arguments from a dtype and one of `sizes`."""
        return getattr(samples, self.name)


_QKV = ("q_BSHK", "k_BSHK", "v_BSHV")
_SMALL_HEADS = {"tokens": 33, "keys": 16, "values": 16, "chunk": 16}

OPS = (
    Op(causal_attention, ({"dim": 16, "with_far": True},), ("q_THD", "k_TGD", "v_TGD", "far")),
    Op(convolved_heads, ({"key_dim": 16, "value_dim": 16},), ("x_BSC", "taps_TC", "recent_BTC")),
    Op(cross_entropy, trained=("logits_NV",)),
    Op(decode_attention, ({"dim": 16}, {"dim": 16, "ring": 4096})),
    Op(fused_linear),
    Op(fused_mlp),
    Op(gated_delta_rule, (_SMALL_HEADS,), (*_QKV, "g_BSH", "beta_BSH", "state_BHKV")),
    Op(int8_matmul),
    Op(weight_only_matmul, ({}, {"rows": 8})),
    Op(layer_norm_dropout_relu, trained=("x", "weight", "bias")),
    Op(linear_cross_entropy, ({}, {"reduction": "none"}), ("hidden_ND", "weight_VD", "bias_V")),
    Op(memory_step, ({"keys": 16, "values": 16},)),
    Op(rms_norm, trained=("x", "weight")),
    Op(add_rms_norm, trained=("x", "residual", "weight")),
    Op(rope, ({}, {"positioned": False}), ("q_BSHD", "k_BSHD")),
    Op(slot_write, ({"slots": 20, "tokens": 5, "heads": 2, "dim": 16},)),
    Op(small_matmul, ({}, {"rows": 8}), ("x_MK", "w_NK", "bias_N")),
    Op(swiglu, trained=("gate", "up")),
    Op(packed_swiglu, trained=("gate_up",)),
    Op(titans_memory, (_SMALL_HEADS,), (*_QKV, "alpha_BSH", "eta_BSH", "theta_BSH", "state")),
    Op(window_attention, ({"window": 4, "shift": 2},), ("qkv_BHW3C", "table_RH")),
    Op(window_attention_expanded, ({"window": 4, "shift": 2},)),
)

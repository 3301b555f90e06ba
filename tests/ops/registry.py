"""The registry of all ops with Triton kernels, over which the contract test iterates.

Every op takes `implementation`: "auto", "reference" or "triton". Importing this module does not import Triton.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from redline import ops

from . import samples

Sizes = dict[str, Any]


@dataclass(frozen=True)
class Op:
    """An op, small sizes that together launch all of its kernels, and the arguments that have gradients."""

    function: Callable[..., Any]
    sizes: tuple[Sizes, ...] = ({},)
    trained: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.function.__name__

    @property
    def sample(self) -> Callable[..., samples.Arguments]:
        """Returns the function that creates arguments from a dtype and one of `sizes`."""
        return getattr(samples, self.name)


_QKV = ("q_BSHK", "k_BSHK", "v_BSHV")
_SMALL_HEADS = {"tokens": 33, "keys": 16, "values": 16, "chunk": 16}

OPS = (
    Op(ops.causal_attention, ({"dim": 16, "with_far": True},), ("q_THD", "k_TGD", "v_TGD", "far")),
    Op(ops.convolved_heads, ({"key_dim": 16, "value_dim": 16},), ("x_BSC", "taps_TC", "recent_BTC")),
    Op(ops.cross_entropy, trained=("logits_NV",)),
    Op(ops.fused_linear),
    Op(ops.fused_mlp),
    Op(ops.gated_delta_rule, (_SMALL_HEADS,), (*_QKV, "g_BSH", "beta_BSH", "state_BHKV")),
    Op(ops.int8_matmul),
    Op(ops.weight_only_matmul, ({}, {"rows": 8})),
    Op(ops.layer_norm_dropout_relu, trained=("x", "weight", "bias")),
    Op(ops.linear_cross_entropy, ({}, {"reduction": "none"}), ("hidden_ND", "weight_VD", "bias_V")),
    Op(ops.memory_step, ({"keys": 16, "values": 16},)),
    Op(ops.paged_attention, ({"dim": 16}, {"dim": 16, "width": 3, "window": 40, "alone": True})),
    Op(ops.rms_norm, trained=("x", "weight")),
    Op(ops.add_rms_norm, trained=("x", "residual", "weight")),
    Op(ops.rope, ({}, {"positioned": False}), ("q_BSHD", "k_BSHD")),
    Op(ops.sample),
    Op(ops.slot_write, ({"slots": 20, "tokens": 5, "heads": 2, "dim": 16},)),
    Op(ops.small_matmul, ({}, {"rows": 8}), ("x_MK", "w_NK", "bias_N")),
    Op(ops.swiglu, trained=("gate", "up")),
    Op(ops.packed_swiglu, trained=("gate_up",)),
    Op(ops.titans_memory, (_SMALL_HEADS,), (*_QKV, "alpha_BSH", "eta_BSH", "theta_BSH", "state")),
    Op(ops.window_attention, ({"window": 4, "shift": 2},), ("qkv_BHW3C", "table_RH")),
    Op(ops.window_attention_expanded, ({"window": 4, "shift": 2},)),
)

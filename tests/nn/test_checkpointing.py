"""Tests which operations selective checkpointing saves, by the names under which the ops are registered."""

import importlib
from pathlib import Path

import pytest
import torch
from torch import Tensor

import redline.ops
from redline.nn.checkpointing import EXPENSIVE_OPS, checkpointed

OURS = [name.removeprefix("redline::") for name in EXPENSIVE_OPS if name.startswith("redline::")]
# Cheap compared with a matrix product: recomputed.
CHEAP = {
    "rms_norm",
    "add_rms_norm",
    "layer_norm_dropout_relu",
    "swiglu",
    "packed_swiglu",
    "rope",
    "cross_entropy",
    "convolved_heads",
}
# Never recomputed: ops without a gradient, and parts of a backward pass.
ELSEWHERE = {
    "fused_linear",
    "fused_mlp",
    "linear_cross_entropy_scaled",
    "memory_step",
    "paged_attention",
    "paged_attention_on_cpu",
    "sample",
    "slot_write",
    "window_attention_table_gradient",
    "window_attention_expanded",
}


@pytest.fixture(scope="module")
def registered() -> set[str]:
    pytest.importorskip("triton")
    for path in Path(redline.ops.__file__).parent.glob("*/triton.py"):
        importlib.import_module(f"redline.ops.{path.parent.name}.triton")
    names = {schema.name for schema in torch._C._jit_get_all_schemas()}
    return {name.removeprefix("redline::") for name in names if name.startswith("redline::")}


def test_every_op_is_listed_as_expensive_or_cheap(registered: set[str]) -> None:
    assert set(OURS) <= registered
    forward = {name for name in registered if not name.endswith("_backward")}
    assert forward == set(OURS) | CHEAP | ELSEWHERE


def test_torch_attention_has_the_listed_name() -> None:
    pytest.importorskip("torch.nn.attention.varlen")
    assert (
        "torch_attn::_varlen_attn" in EXPENSIVE_OPS
        and torch.ops.torch_attn._varlen_attn.default.name() in EXPENSIVE_OPS
    )
    assert torch.ops.higher_order.flex_attention.name() in EXPENSIVE_OPS


def test_an_expensive_op_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[str] = []

    def product(name: str) -> torch.library.CustomOpDef:
        def run(x: Tensor) -> Tensor:
            runs.append(name)
            return x * 2

        made = torch.library.custom_op(f"redline_test::{name}", run, mutates_args=())
        made.register_fake(torch.empty_like)
        made.register_autograd(lambda context, grad: grad * 2)
        return made

    dear, cheap = product("dear"), product("cheap")
    monkeypatch.setattr("redline.nn.checkpointing.EXPENSIVE_OPS", (*EXPENSIVE_OPS, "redline_test::dear"))
    x = torch.randn(7, requires_grad=True)
    checkpointed(lambda x: (dear(x).sin() * cheap(x)).sin(), x, selective=True).sum().backward()
    assert runs.count("dear") == 1 and runs.count("cheap") == 2

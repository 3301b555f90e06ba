"""Every op raises a ModelError for each single input of a wrong shape, dtype or device, and accepts valid ones."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from redline.errors import ModelError
from redline.ops.causal_attention import Far, causal_attention
from redline.ops.convolved_heads import convolved_heads
from redline.ops.cross_entropy import cross_entropy
from redline.ops.fused_linear import fused_linear
from redline.ops.gated_delta_rule import gated_delta_rule
from redline.ops.int8_matmul import int8_matmul, weight_only_matmul
from redline.ops.layer_norm_dropout_relu import layer_norm_dropout_relu
from redline.ops.linear_cross_entropy import linear_cross_entropy
from redline.ops.paged_attention import PagedRows, paged_attention
from redline.ops.rms_norm import add_rms_norm, rms_norm
from redline.ops.rope import rope
from redline.ops.sample import sample
from redline.ops.slot_write import slot_write
from redline.ops.slot_write.reference import Slots
from redline.ops.small_matmul import small_matmul
from redline.ops.swiglu import packed_swiglu, swiglu
from redline.ops.titans_memory import TitansState, titans_memory
from redline.ops.window_attention import window_attention


def floats(*shape: int) -> Tensor:
    return torch.rand(shape)


def whole(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


@dataclass(frozen=True)
class Case:
    """An op with valid inputs.

    `free` are the dimensions (argument, index) that may have any length, where -1 is an additional dimension. `checks`
    are the checks besides shapes, and `any_dtype` the inputs whose dtype is not checked.
    """

    op: Callable[..., Any]
    inputs: dict[str, Any]
    free: frozenset[tuple[str, int]] = frozenset()
    checks: frozenset[str] = frozenset({"dtype", "device"})
    any_dtype: tuple[str, ...] = ()


SHAPES = frozenset({"shape"})
QKV = {"q": floats(2, 5, 3, 8), "k": floats(2, 5, 3, 8), "v": floats(2, 5, 3, 6)}


def named(op: Callable[..., Any], *names: str) -> Callable[..., Any]:
    """Returns the op with these inputs as positional arguments."""
    return lambda **inputs: op(*(inputs[name] for name in names))


def far_attention(q: Tensor, k: Tensor, v: Tensor, lowest: Tensor, **far: Tensor) -> Any:
    return causal_attention(q, k, v, lowest, far=Far(far["far_q"], far["far_k"], far["bias"], far["first"]))


def write(key: Tensor, value: Tensor, score: Tensor, wanted: Tensor, **slots: Tensor) -> Any:
    return slot_write(Slots(*slots.values()), key, value, score, wanted, 0.5)


NEAR = {"q": floats(5, 6, 4), "k": floats(5, 2, 4), "v": floats(5, 2, 4), "lowest": whole(5)}
CASES = {
    "causal_attention": Case(named(causal_attention, *NEAR), NEAR),
    "far_attention": Case(
        far_attention,
        {**NEAR, "far_q": floats(5, 6, 4), "far_k": floats(5, 2, 4), "bias": floats(5), "first": whole(5)},
    ),
    "rope": Case(
        named(rope, "q", "k", "cos", "sin", "positions"),
        {
            "q": floats(2, 5, 4, 8),
            "k": floats(2, 5, 1, 8),
            "cos": floats(7, 4),
            "sin": floats(7, 4),
            "positions": whole(2, 5),
        },
        frozenset({("q", 2), ("k", 2)}),
        frozenset({"device"}),
    ),
    "convolved_heads": Case(
        lambda **given: convolved_heads(given["x"], given["taps"], given["recent"], 2, 3, given["documents"]),
        {"x": floats(2, 5, 20), "taps": floats(4, 20), "recent": floats(2, 3, 20), "documents": whole(2, 5)},
    ),
    "fused_linear": Case(
        torch.no_grad()(named(fused_linear, "x", "weight", "bias", "out")),
        {"x": floats(3, 4), "weight": floats(5, 4), "bias": floats(5), "out": floats(3, 5)},
        checks=SHAPES,
    ),
    "int8_matmul": Case(
        lambda **given: int8_matmul(*given.values(), out_dtype=torch.float32),
        {
            "x": whole(3, 4).to(torch.int8),
            "weight": whole(5, 4).to(torch.int8),
            "x_scale": floats(3),
            "w_scale": floats(5),
            "bias": floats(5),
        },
        any_dtype=("bias",),
    ),
    "weight_only_matmul": Case(
        named(weight_only_matmul, "x", "weight", "scale", "bias"),
        {"x": floats(3, 4), "weight": whole(5, 4).to(torch.int8), "scale": floats(5), "bias": floats(5)},
        frozenset({("x", 0)}),
        any_dtype=("bias",),
    ),
    "small_matmul": Case(
        named(small_matmul, "x", "weight", "bias"),
        {"x": floats(3, 4), "weight": floats(5, 4), "bias": floats(5)},
        frozenset({("x", 0)}),
    ),
    "layer_norm_dropout_relu": Case(
        named(layer_norm_dropout_relu, "x", "weight", "bias"),
        {"x": floats(2, 3, 4), "weight": floats(4), "bias": floats(4)},
        frozenset({("x", -1), ("x", 0), ("x", 1)}),
    ),
    "cross_entropy": Case(
        named(cross_entropy, "logits", "target"),
        {"logits": floats(3, 4), "target": whole(3)},
        frozenset({("logits", 1)}),
    ),
    "linear_cross_entropy": Case(
        named(linear_cross_entropy, "hidden", "weight", "target", "bias"),
        {"hidden": floats(3, 4), "weight": floats(5, 4), "target": whole(3), "bias": floats(5)},
        checks=frozenset({"device"}),
    ),
    "gated_delta_rule": Case(
        named(gated_delta_rule, "q", "k", "v", "g", "beta", "state", "documents"),
        {**QKV, "g": -floats(2, 5, 3), "beta": floats(2, 5, 3), "state": floats(2, 3, 8, 6), "documents": whole(2, 5)},
        checks=SHAPES,
    ),
    "titans_memory": Case(
        lambda **given: titans_memory(
            *(given[name] for name in ("q", "k", "v", "alpha", "eta", "theta")),
            TitansState(*(given[name] for name in ("weight", "momentum", "held", "position"))),
            given["documents"],
        ),
        {
            **QKV,
            **{name: floats(2, 5, 3) for name in ("alpha", "eta", "theta")},
            **{name: floats(2, 3, 8, 6) for name in ("weight", "momentum", "held")},
            "position": whole(2),
            "documents": whole(2, 5),
        },
        checks=SHAPES,
    ),
    "paged_attention": Case(
        lambda **given: paged_attention(
            *(given[name] for name in ("q", "k", "v", "keys", "values")),
            PagedRows(*(given[name] for name in ("slots", "starts", "lengths", "tables"))),
        ),
        {
            "q": floats(5, 6, 4),
            "k": floats(5, 3, 4),
            "v": floats(5, 3, 4),
            "keys": floats(4, 8, 3, 4),
            "values": floats(4, 8, 3, 4),
            "slots": whole(5),
            "starts": whole(3),
            "lengths": whole(2),
            "tables": whole(2, 2),
        },
        frozenset({("tables", 1)}),
    ),
    "rms_norm": Case(
        named(rms_norm, "x", "weight"),
        {"x": floats(2, 3, 4), "weight": floats(4)},
        frozenset({("x", -1), ("x", 0), ("x", 1)}),
    ),
    "add_rms_norm": Case(
        named(add_rms_norm, "x", "residual", "weight"),
        {"x": floats(2, 3, 4), "residual": floats(2, 3, 4), "weight": floats(4)},
    ),
    "swiglu": Case(named(swiglu, "gate", "up"), {"gate": floats(2, 4), "up": floats(2, 4)}),
    "packed_swiglu": Case(
        named(packed_swiglu, "both"),
        {"both": floats(2, 4)},
        frozenset({("both", -1), ("both", 0)}),
        frozenset({"dtype"}),
    ),
    "sample": Case(
        lambda **given: sample(*given.values()),
        {"logits": floats(3, 7), "temperature": floats(3), "keys": whole(3), "drawn": whole(3)},
        frozenset({("logits", 1)}),
    ),
    "slot_write": Case(
        write,
        {
            "key": floats(2, 4, 3, 8),
            "value": floats(2, 4, 3, 8),
            "score": floats(2, 4),
            "wanted": torch.ones(2, 4, dtype=torch.bool),
            **{name: floats(2, 6, 3, 8) for name in ("slot_key", "slot_value")},
            **{name: floats(2, 6) for name in Slots._fields[2:]},
        },
        checks=SHAPES,
    ),
    "window_attention": Case(
        lambda **given: window_attention(given["qkv"], given["table"], 2),
        {"qkv": floats(2, 4, 6, 12), "table": floats(9, 2)},
        frozenset({("qkv", 0)}),
        frozenset({"device"}),
    ),
}


def wrong(case: Case) -> Iterator[tuple[str, str, Tensor]]:
    for name, given in case.inputs.items():
        for dim in range(given.ndim):
            if (name, dim) not in case.free:
                shape = [length + (index == dim) for index, length in enumerate(given.shape)]
                yield name, f"dimension {dim} is longer", torch.zeros(shape, dtype=given.dtype)
        if (name, -1) not in case.free:
            yield name, "one dimension more", given[None]
        if "dtype" in case.checks and name not in case.any_dtype:
            yield name, "another kind", given.to(torch.int32 if given.is_floating_point() else torch.float32)
        if "device" in case.checks:
            yield name, "another device", given.to("meta")


@pytest.mark.parametrize("name", CASES)
def test_every_invalid_input_is_refused(name: str) -> None:
    case = CASES[name]
    case.op(**case.inputs)
    accepted = []
    for argument, what, tensor in wrong(case):
        try:
            case.op(**{**case.inputs, argument: tensor})
        except ModelError:
            continue
        except Exception as error:
            what += f" raises {type(error).__name__}"
        accepted.append(f"{argument}: {what}")
    assert not accepted

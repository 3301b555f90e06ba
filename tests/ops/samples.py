"""Random arguments for every op, on torch's default device. The default sizes are those of real models.

Each function has the name of an op, takes the dtype of the activations and sizes, and returns keyword arguments.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from redline.ops.causal_attention import Far
from redline.ops.fused_linear import moment_parts
from redline.ops.memory_step import Learned, Projected
from redline.ops.paged_attention import PagedRows
from redline.ops.rope import rope_tables
from redline.ops.slot_write import Slots
from redline.ops.titans_memory import TitansState
from redline.ops.window_attention import expand_bias_table

Arguments = dict[str, Any]


def causal_attention(
    dtype: torch.dtype, tokens: int = 130, heads: int = 4, shared: int = 2, dim: int = 64, with_far: bool = False
) -> Arguments:
    q, far_q = _normals(2, dtype, tokens, heads, dim)
    k, v, far_k = _normals(3, dtype, tokens, shared, dim)
    first = torch.zeros(tokens, dtype=torch.int32)
    near = (torch.arange(tokens, dtype=torch.int32) - 50).clamp_min(0)
    far = Far(far_q, far_k, _normal(torch.float32, tokens), first) if with_far else None
    return {"q_THD": q, "k_TGD": k, "v_TGD": v, "lowest_T": near, "far": far}


def convolved_heads(
    dtype: torch.dtype,
    tokens: int = 70,
    taps: int = 4,
    heads: int = 2,
    key_dim: int = 64,
    value_dim: int = 64,
    packed: bool = True,
) -> Arguments:
    channels = heads * (2 * key_dim + value_dim)
    documents = torch.arange(tokens).unsqueeze(0) // 30 if packed else None
    x, recent = _normal(dtype, 1, tokens, channels), _normal(dtype, 1, taps - 1, channels)
    tensors = {"x_BSC": x, "taps_TC": _normal(dtype, taps, channels), "recent_BTC": recent, "documents_BS": documents}
    return tensors | {"heads": heads, "key_dim": key_dim}


def cross_entropy(
    dtype: torch.dtype, rows: int = 3, classes: int = 5000, smoothing: float = 0.1, reduction: str = "mean"
) -> Arguments:
    options = {"label_smoothing": smoothing, "z_loss": 0.01, "reduction": reduction}
    return {"logits_NV": _normal(dtype, rows, classes), "target_N": torch.randint(classes, (rows,))} | options


def fused_linear(
    dtype: torch.dtype,
    rows: int = 130,
    channels: int = 184,
    columns: int = 552,
    normalized: bool = True,
    with_epilogue: bool = False,
    activation: str = "gelu",
) -> Arguments:
    """`with_epilogue` adds a residual and computes the moments of the result."""
    weight = _normal(dtype, columns, channels)
    given: Arguments = {"x_MK": _normal(dtype, rows, channels), "weight_NK": weight, "bias_N": _normal(dtype, columns)}
    given |= {"out_MN": torch.empty(rows, columns, dtype=dtype), "activation": activation}
    if normalized:
        given |= {"moments_P2M": _normal(torch.float32, 1, 2, rows).abs(), "weight_sums_N": weight.float().sum(1)}
        given["channels"] = channels
    if with_epilogue:
        given |= {"residual_MN": _normal(dtype, rows, columns), "share": 0.2}
        given["new_moments_P2M"] = torch.empty(moment_parts(columns), 2, rows)
    return given


def fused_mlp(
    dtype: torch.dtype, rows: int = 130, channels: int = 184, hidden: int = 64, columns: int = 32
) -> Arguments:
    inner, outer = _normal(dtype, hidden, channels), _normal(dtype, columns, channels + hidden)
    weights = {"inner_HK": inner, "outer_NJ": outer, "inner_sums_H": inner.float().sum(1)}
    biases = {"inner_bias_H": _normal(dtype, hidden), "outer_bias_N": _normal(dtype, columns)}
    moments = {"moments_P2M": _normal(torch.float32, 1, 2, rows).abs(), "channels": channels}
    moments["new_moments_P2M"] = torch.empty(moment_parts(columns), 2, rows)
    rest = {"activation": "leaky_relu", "residual_MN": _normal(dtype, rows, columns) if columns > 32 else None}
    given = {"x_MK": _normal(dtype, rows, channels), "out_MN": torch.empty(rows, columns, dtype=dtype)}
    return given | weights | biases | moments | rest


def gated_delta_rule(
    dtype: torch.dtype, tokens: int = 130, heads: int = 2, keys: int = 64, values: int = 64, packed: bool = True,
    chunk: int = 64, batch: int = 1,
) -> Arguments:  # fmt: skip
    q, k = (F.normalize(one.float(), dim=-1).to(dtype) for one in _normals(2, dtype, batch, tokens, heads, keys))
    g, beta = -torch.rand(batch, tokens, heads), torch.rand(batch, tokens, heads)
    given: Arguments = {"q_BSHK": q, "k_BSHK": k, "v_BSHV": _normal(dtype, batch, tokens, heads, values), "g_BSH": g}
    given |= {"beta_BSH": beta, "chunk": chunk}
    if packed:
        given["state_BHKV"] = _normal(torch.float32, batch, heads, keys, values)
        given["documents_BS"] = (torch.arange(tokens, dtype=torch.int32) // 50).expand(batch, tokens)
    return given


def int8_matmul(dtype: torch.dtype, rows: int = 8, columns: int = 512, depth: int = 2048) -> Arguments:
    x, w = _int8(rows, depth), _int8(columns, depth)
    given = {"x_MK": x, "w_NK": w, "x_scale": torch.rand(rows), "w_scale_N": torch.rand(columns)}
    return given | {"bias_N": _normal(dtype, columns), "out_dtype": dtype}


def weight_only_matmul(dtype: torch.dtype, rows: int = 1, columns: int = 512, depth: int = 2048) -> Arguments:
    given = {"x_MK": _normal(dtype, rows, depth), "w_NK": _int8(columns, depth), "w_scale_N": torch.rand(columns)}
    return given | {"bias_N": _normal(dtype, columns)}


def layer_norm_dropout_relu(dtype: torch.dtype, rows: int = 45, width: int = 768, p: float = 0.1) -> Arguments:
    weight, bias = _normals(2, dtype, width)
    return {"x": _normal(dtype, rows, width), "weight": weight, "bias": bias, "p": p, "seed": 7}


def linear_cross_entropy(
    dtype: torch.dtype, rows: int = 9, features: int = 64, classes: int = 1000, reduction: str = "mean"
) -> Arguments:
    given = {"hidden_ND": _normal(dtype, rows, features), "weight_VD": _normal(dtype, classes, features)}
    given |= {"bias_V": _normal(dtype, classes), "target_N": torch.randint(classes, (rows,))}
    return given | {"z_loss": 0.01, "reduction": reduction}


def memory_step(
    dtype: torch.dtype, batch: int = 2, heads: int = 3, keys: int = 64, values: int = 64, taps: int = 4
) -> Arguments:
    channels = heads * (2 * keys + values)
    decay, strength = _normals(2, dtype, batch, heads)
    token = Projected(_normal(dtype, batch, channels), decay, strength, _normal(dtype, batch, heads * values))
    bias, rate = _normals(2, dtype, heads)
    learned = Learned(_normal(dtype, taps, channels), bias, rate, _normal(dtype, values))
    state = _normal(torch.float32, batch, heads, keys, values)
    recent = _normal(dtype, batch, taps - 1, channels)
    return {"token": token, "learned": learned, "recent_BTC": recent, "state_BHKV": state, "eps": 1e-5}


def paged_attention(
    dtype: torch.dtype,
    heads: int = 8,
    groups: int = 2,
    dim: int = 64,
    width: int = 9,
    window: int | None = None,
    alone: bool = False,
) -> Arguments:
    """Two rows that decode, and two prompts, of which one has stored tokens; then padding. `alone` is one prompt."""
    size, counts, lengths = 64, [1, 1, 70, 33], [20, width * 64 - 1, 0, 40]
    if alone:
        counts, lengths = [70], [0]
    k, v = _normals(2, dtype, sum(counts) + 3, groups, dim)
    keys, values = _normals(2, dtype, 4 * width, size, groups, dim)
    tables = torch.randperm(4 * width).view(4, width)[: len(counts)]
    positions = [(row, length + i) for row, length in enumerate(lengths) for i in range(counts[row])]
    slots = [int(tables[row, place // size]) * size + place % size for row, place in positions]
    starts = torch.tensor([0, *counts]).cumsum(0)
    rows = PagedRows(torch.tensor([*slots, -1, -1, -1]), starts, torch.tensor(lengths), tables, 0 if alone else 2)
    new = {"q_THD": _normal(dtype, sum(counts) + 3, heads, dim), "k_TGD": k, "v_TGD": v}
    return new | {"keys_NPGD": keys, "values_NPGD": values, "rows": rows, "window": window}


def rms_norm(dtype: torch.dtype, rows: int = 45, width: int = 768) -> Arguments:
    return {"x": _normal(dtype, rows, width), "weight": _normal(dtype, width)}


def add_rms_norm(dtype: torch.dtype, rows: int = 45, width: int = 768) -> Arguments:
    return rms_norm(dtype, rows, width) | {"residual": _normal(dtype, rows, width)}


def rope(
    dtype: torch.dtype, tokens: int = 5, heads: int = 12, shared: int = 4, dim: int = 64, positioned: bool = True
) -> Arguments:
    cos, sin = rope_tables(40, dim)
    positions = torch.randint(40, (1, tokens)) if positioned else None
    q, k = _normal(dtype, 1, tokens, heads, dim), _normal(dtype, 1, tokens, shared, dim)
    return {"q_BSHD": q, "k_BSHD": k, "cos_SD": cos, "sin_SD": sin, "positions_BS": positions}


def sample(dtype: torch.dtype, rows: int = 3, columns: int = 5000) -> Arguments:
    numbers = {"keys_N": torch.randint(2**32, (rows,)), "drawn_N": torch.arange(rows)}
    return {"logits_NV": _normal(dtype, rows, columns), "temperature_N": torch.arange(rows) / 2} | numbers


def slot_write(
    dtype: torch.dtype, batch: int = 2, slots: int = 512, tokens: int = 32, heads: int = 12, dim: int = 64
) -> Arguments:
    key, value = _normals(2, dtype, batch, tokens, heads, dim)
    held = _normals(2, dtype, batch, slots, heads, dim)
    score, usage, age = (torch.rand(batch, slots) for _ in range(3))
    mass = torch.randint(5, (batch, slots)).float()
    offered = {"key_BCHD": key, "value_BCHD": value, "score_BC": torch.rand(batch, tokens)}
    offered["wanted_BC"] = torch.rand(batch, tokens) < 0.9
    return offered | {"slots": Slots(held[0], held[1], score, mass, usage, age), "threshold": 0.85}


def small_matmul(dtype: torch.dtype, rows: int = 1, columns: int = 512, depth: int = 2048) -> Arguments:
    weight = _normal(dtype, columns, depth)
    return {"x_MK": _normal(dtype, rows, depth), "w_NK": weight, "bias_N": _normal(dtype, columns)}


def swiglu(dtype: torch.dtype, rows: int = 5, width: int = 3000) -> Arguments:
    gate, up = _normals(2, dtype, rows, width)
    return {"gate": gate, "up": up}


def packed_swiglu(dtype: torch.dtype, rows: int = 5, width: int = 3000) -> Arguments:
    return {"gate_up": _normal(dtype, rows, 2 * width)}


def titans_memory(
    dtype: torch.dtype, tokens: int = 130, heads: int = 2, keys: int = 64, values: int = 64, split: bool = True,
    chunk: int = 64, batch: int = 1,
) -> Arguments:  # fmt: skip
    """`split` adds a state and documents, so that chunks do not start at multiples of `chunk`."""
    q, k = (F.normalize(one.float(), dim=-1).to(dtype) for one in _normals(2, dtype, batch, tokens, heads, keys))
    alpha, eta, theta = (torch.rand(batch, tokens, heads) for _ in range(3))
    given: Arguments = {
        "q_BSHK": q,
        "k_BSHK": k,
        "v_BSHV": _normal(dtype, batch, tokens, heads, values),
        "alpha_BSH": alpha,
    }
    given |= {"eta_BSH": eta, "theta_BSH": theta, "chunk": chunk}
    if split:
        memory, momentum, anchor = _normals(3, torch.float32, batch, heads, keys, values)
        given["state"] = TitansState(memory, momentum, anchor, torch.full((batch,), 5, dtype=torch.int32))
        given["documents_BS"] = (torch.arange(tokens, dtype=torch.int32) // 50).expand(batch, tokens)
    return given


def window_attention(
    dtype: torch.dtype, windows: int = 1, head_dim: int = 30, heads: int = 6, window: int = 16, shift: int = 8
) -> Arguments:
    qkv = _normal(dtype, 1, window, windows * window, 3 * head_dim * heads)
    table = _normal(dtype, (2 * window - 1) ** 2, heads)
    return {"qkv_BHW3C": qkv, "table_RH": table, "window": window, "shift": shift}


def window_attention_expanded(
    dtype: torch.dtype, windows: int = 1, head_dim: int = 30, heads: int = 6, window: int = 16, shift: int = 8
) -> Arguments:
    given = window_attention(dtype, windows, head_dim, heads, window, shift)
    return {"qkv_BHW3C": given["qkv_BHW3C"], "bias_HRWW": expand_bias_table(given["table_RH"], window), "shift": shift}


def _normal(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape).to(dtype)


def _normals(count: int, dtype: torch.dtype, *shape: int) -> list[Tensor]:
    return [_normal(dtype, *shape) for _ in range(count)]


def _int8(*shape: int) -> Tensor:
    return torch.randint(-128, 128, shape).to(torch.int8)

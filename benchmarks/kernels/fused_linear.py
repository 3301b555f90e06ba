"""Times the linear layers of a DRCT-L group with their norms, activations and residuals: eager, compiled, fused (bf16).

    python benchmarks/kernels/fused_linear.py --out FILE [--only fc1] [--sweep]

One image of 256 × 256 tokens, in the narrowest and the widest of the five blocks. Eager and torch.compile use the true
widths; the fused kernel pads them to multiples of 8, which is not counted as arithmetic.
"""

import copy
import itertools
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from arms import Case, Run, forward, main, with_values
from torch import Tensor, nn
from torch.nn import functional as F

from redline.models.drct.gpu_inference import PackedLinear, padded
from redline.ops.fused_linear import moment_parts, moments

ROWS = 256 * 256
# Eager arms round after every operation.
LARGEST_ERROR = 0.02


@dataclass(frozen=True)
class Layer:
    name: str
    channels: int
    columns: int
    normalize: bool = False
    activation: str = ""
    residual: bool = False


LAYERS = tuple(
    layer
    for width, hidden in ((180, 360), (308, 308))
    for layer in (
        Layer("qkv", width, 3 * width, normalize=True),
        Layer("proj", width, width, residual=True),
        Layer("fc1", width, hidden, normalize=True, activation="gelu"),
    )
)


def case(layer: Layer) -> Case:
    x, old = (torch.randn(ROWS, width, device="cuda").bfloat16() for width in (layer.channels, layer.columns))
    linear = nn.Linear(layer.channels, layer.columns, device="cuda").requires_grad_(False)
    norm = nn.LayerNorm(layer.channels, device="cuda").requires_grad_(False) if layer.normalize else None

    def plain(x: Tensor, old: Tensor, linear: nn.Linear, norm: nn.LayerNorm | None) -> Tensor:
        y = linear(x if norm is None else norm(x))
        if layer.activation:
            y = F.gelu(y) if layer.activation == "gelu" else F.leaky_relu(y, 0.2)
        return old + y if layer.residual else y

    into, out_of = torch.arange(layer.channels), torch.arange(layer.columns)
    packed = PackedLinear(linear, into, out_of, norm).bfloat16()
    half, half_norm = copy.deepcopy(linear).bfloat16(), copy.deepcopy(norm)
    if half_norm is not None:
        half_norm.bfloat16()
    wide = F.pad(x, (0, padded(layer.channels) - layer.channels))
    wide_old = F.pad(old, (0, padded(layer.columns) - layer.columns))
    pieces = [128, padded(180) - 128] + [32] * ((layer.channels - 180) // 32)
    sums = torch.stack([moments(block) for block in wide.split(pieces, 1)]) if layer.normalize else None
    out = torch.empty_like(wide_old)
    new = torch.empty(moment_parts(out.shape[1]), 2, ROWS, device="cuda")

    def eager(x: Tensor, old: Tensor) -> Tensor:
        return plain(x, old, half, half_norm)

    def fused(x: Tensor, old: Tensor) -> Tensor:
        packed(
            wide,
            sums,
            out,
            layer.activation,
            wide_old if layer.residual else None,
            new_moments_P2M=new if layer.residual else None,
        )
        return out[:, : layer.columns]

    moved = x.nbytes + out.nbytes + (old.nbytes if layer.residual else 0)
    return Case(
        name=f"fused_linear {layer.name}",
        sizes={"rows": ROWS, "channels": layer.channels, "columns": layer.columns, "dtype": "bf16"},
        arms={
            "eager": lambda: forward(eager, (x, old)),
            "torch.compile": lambda: forward(torch.compile(eager, fullgraph=True, dynamic=False), (x, old)),
            "redline": lambda: forward(fused, (x, old)),
        },
        expected=lambda: (plain(x.float(), old.float(), linear, norm),),
        largest_error=LARGEST_ERROR,
        needed_bytes=moved,
        needed_flop=2.0 * ROWS * layer.channels * layer.columns,
    )


def cases() -> Iterable[Case]:
    return map(case, LAYERS)


def sweep() -> Iterable[Case]:
    from redline.ops.fused_linear import triton

    for layer in LAYERS:
        plain = case(layer)
        build = plain.arms["redline"]
        arms: dict[str, Callable[[], Run]] = {"as shipped": build}
        widths = (128,) if layer.residual else (64, 128, 256)
        shapes = itertools.product((64, 128, 256), widths, (32, 64), ((4, 2), (4, 3), (4, 4), (8, 2), (8, 3), (8, 4)))
        for rows, columns, channels, (warps, stages) in shapes:
            if not 16 <= rows * columns // (32 * warps) <= 128:
                continue  # exceeds the registers, or is too small
            tiles = triton.Tiles(rows, columns, channels, warps, stages)
            described: dict[str, object] = {"DESCRIPTOR_TILES": tiles}
            # With a limit that no layer reaches, all layers use pointers instead of descriptors.
            addressed: dict[str, object] = {"TILES": dict.fromkeys(triton.TILES, tiles), "_SOME": sys.maxsize}
            for name, values in (("by descriptors", described), ("by addresses", addressed)):
                arms[f"{tiles} {name}"] = lambda values=values, build=build: with_values(triton, values, build())
        yield replace(plain, name=f"sweep of {plain.name}", arms=arms)


if __name__ == "__main__":
    sys.exit(main("fused_linear", cases, sweep))

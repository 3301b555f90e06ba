"""Times the MLP of a DRCT-L block with the 1×1 convolution after it, in bf16: eager, compiled, in layers, and fused.

    python benchmarks/kernels/fused_mlp.py --out FILE [--sweep]

One image of 256 × 256 tokens, in the narrowest and the widest of a group's five blocks. Eager and torch.compile run the
three layers of the model; the fused arms run two, the second of which is the product of the last two
(`models/drct/packed.py`). The arithmetic of two layers is counted.
"""

import copy
import itertools
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from arms import Case, Run, forward, main, with_values
from torch import Tensor, nn
from torch.nn import functional as F

from redline.models.drct.gpu_inference import PackedLinear, fold_linear, padded
from redline.ops.fused_linear import moment_parts, moments_in_parts
from redline.ops.fused_mlp import fused_mlp

ROWS = 256 * 256
# Eager arms round after every operation.
LARGEST_ERROR = 0.02
# Input channels, hidden channels and output columns.
SIZES = ((180, 360, 32), (308, 308, 180))


class Block(nn.Module):
    """The layers after the attention of a block."""

    def __init__(self, width: int, hidden: int, columns: int) -> None:
        super().__init__()
        self.norm, self.fc1 = nn.LayerNorm(width), nn.Linear(width, hidden)
        self.fc2, self.adjust = nn.Linear(hidden, width), nn.Linear(width, columns)

    def forward(self, x: Tensor, old: Tensor) -> Tensor:
        y = self.adjust(x + self.fc2(F.gelu(self.fc1(self.norm(x)))))
        return F.leaky_relu(y, 0.2) if self.adjust.out_features == 32 else old + 0.2 * y


def case(width: int, hidden: int, columns: int) -> Case:
    x, old = (torch.randn(ROWS, size, device="cuda").bfloat16() for size in (width, columns))
    block = Block(width, hidden, columns).cuda().requires_grad_(False)
    half = copy.deepcopy(block).bfloat16()
    places, of_hidden = torch.arange(width), torch.arange(hidden)
    inner = PackedLinear(block.fc1, places, of_hidden, block.norm).bfloat16()
    both = torch.cat((places, padded(width) + of_hidden))
    outer = PackedLinear(fold_linear(block.fc2, block.adjust), both, torch.arange(columns)).bfloat16()
    wide, wide_old = (F.pad(tensor, (0, padded(tensor.shape[1]) - tensor.shape[1])) for tensor in (x, old))
    sums, out = moments_in_parts(wide), torch.empty_like(wide_old)
    new = torch.empty(moment_parts(out.shape[1]), 2, ROWS, device="cuda")
    few = columns == 32
    activation, residual, share = "leaky_relu" if few else "", None if few else wide_old, 1.0 if few else 0.2

    def fused(x: Tensor, old: Tensor) -> Tensor:
        fused_mlp(
            wide, inner.weight, inner.bias, outer.weight, outer.bias, out, sums, inner.weight_sums, width, 1e-5,
            activation, residual, share, new,
        )  # fmt: skip
        return out[:, :columns]

    joint = F.pad(wide, (0, inner.columns))

    def in_layers(x: Tensor, old: Tensor) -> Tensor:
        inner(wide, sums, joint[:, wide.shape[1] :], "gelu")
        outer(joint, None, out, activation, residual, share, new)
        return out[:, :columns]

    return Case(
        name="fused_mlp",
        sizes={"rows": ROWS, "channels": width, "hidden": hidden, "columns": columns, "dtype": "bf16"},
        arms={
            "eager": lambda: forward(half, (x, old)),
            "torch.compile": lambda: forward(torch.compile(half, fullgraph=True, dynamic=False), (x, old)),
            "two fused layers": lambda: forward(in_layers, (x, old)),
            "redline": lambda: forward(fused, (x, old)),
        },
        expected=lambda: (block(x.float(), old.float()),),
        largest_error=LARGEST_ERROR,
        needed_bytes=x.nbytes + out.nbytes + (0 if few else old.nbytes),
        needed_flop=2.0 * ROWS * (width * hidden + (width + hidden) * columns),
    )


def cases() -> Iterable[Case]:
    return (case(*sizes) for sizes in SIZES)


def sweep() -> Iterable[Case]:
    from redline.ops.fused_mlp import triton

    for sizes in SIZES:
        plain = case(*sizes)
        build = plain.arms["redline"]
        arms: dict[str, Callable[[], Run]] = {"as shipped": build}
        shapes = itertools.product((64, 128, 256), (32, 64, 128), (4, 8), (2, 3, 4))
        for kept in (triton.MlpTiles(*shape) for shape in shapes):
            if not 16 <= kept.rows * kept.hidden // (32 * kept.warps) <= 128:
                continue  # exceeds the registers, or is too small
            values: dict[str, object] = {"MLP_TILES": dict.fromkeys(triton.MLP_TILES, kept)}
            arms[str(kept)] = lambda values=values, build=build: with_values(triton, values, build())
        yield replace(plain, name=f"sweep of {plain.name}", arms=arms)


if __name__ == "__main__":
    sys.exit(main("fused_mlp", cases, sweep))

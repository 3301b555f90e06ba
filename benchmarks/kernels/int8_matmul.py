"""Times matrix products with int8 weights against torch._int_mm, torch.compile, and cuBLAS in bf16.

    python benchmarks/kernels/int8_matmul.py --out FILE [--only weight_only] [--sweep]

The weights of a 1.24B Llama and an odd one, from one row to a prompt. torch._int_mm does not support 16 rows or fewer,
nor odd sizes, and its row says so. The fastest tiles belong in `redline/ops/small_matmul/tiles.py`.
"""

import sys
from collections.abc import Callable, Iterable
from functools import partial

import torch
from arms import Case, forward, main
from small_matmul import block_tiles, swept, vector_tiles
from torch import Tensor
from torch.nn import functional as F

from redline.ops.int8_matmul import int8_matmul, int_mm, reference, weight_only_matmul
from redline.ops.small_matmul import tiles

# (outputs, features): q with k and v, gate with up, down, the head; an odd one.
WEIGHTS = ((3072, 2048), (16_384, 2048), (2048, 8192), (128_256, 2048), (3001, 1999))
ROWS = (1, 16, 32, 64, 512)
# The bf16 arm also rounds the weight.
LARGEST_ERROR = 0.02


def case(rows: int, columns: int, depth: int, weight_only: bool) -> Case:
    w = torch.randint(-127, 128, (columns, depth), device="cuda").to(torch.int8)
    w_scale = (torch.rand(columns, device="cuda") + 0.5) / 1000
    x = torch.randint(-127, 128, (rows, depth), device="cuda").to(torch.int8)
    x_scale = (torch.rand(rows, device="cuda") + 0.5) / 100
    x_float = (x * x_scale[:, None]).bfloat16()
    w_float = (w * w_scale[:, None]).bfloat16()
    given = (x_float, w, w_scale) if weight_only else (x, w, x_scale, w_scale)

    def expected() -> tuple[Tensor, ...]:
        if weight_only:
            return (reference.weight_only_matmul(x_float.double(), w, w_scale),)
        return (reference.int8_matmul(x, w, x_scale, w_scale, out_dtype=torch.float32),)

    plain, ours = (
        (reference.weight_only_matmul, weight_only_matmul) if weight_only else (int_mm.int8_matmul, int8_matmul)
    )
    functions: dict[str, Callable[[], Callable[..., Tensor]]] = {
        "bf16 by cuBLAS": lambda: lambda *_: F.linear(x_float, w_float),
        "eager" if weight_only else "torch._int_mm": lambda: plain,
        "torch.compile": lambda: torch.compile(plain, fullgraph=True, dynamic=False),
        "redline": lambda: partial(ours, implementation="triton"),
    }
    return Case(
        name=f"{'weight_only' if weight_only else 'int8'}_matmul {rows} row{'s' * (rows > 1)}",
        sizes={"rows": rows, "outputs": columns, "depth": depth, "dtype": "bf16 × int8" if weight_only else "int8"},
        arms={name: lambda make=make: forward(make(), given) for name, make in functions.items()},
        expected=expected,
        largest_error=LARGEST_ERROR,
        needed_bytes=given[0].nbytes + w.nbytes + 2 * rows * columns,
        needed_flop=2 * rows * columns * depth,
    )


def cases() -> Iterable[Case]:
    for weight_only in (True, False):
        for rows in ROWS:
            for columns, depth in WEIGHTS:
                yield case(rows, columns, depth, weight_only)


def sweep() -> Iterable[Case]:
    for weight_only in (True, False):
        for rows in (1, 16, 64):
            x_bytes = 2 if weight_only else 1
            choices = vector_tiles(1) if weight_only and rows == 1 else block_tiles(max(16, rows), x_bytes, 1)
            for columns, depth in WEIGHTS[:4]:
                plain = case(rows, columns, depth, weight_only)
                shape = tiles.shape_of(rows, columns, depth, x_bytes, 1)
                yield swept(plain, shape, choices, ("bf16 by cuBLAS", "torch.compile"))


if __name__ == "__main__":
    sys.exit(main("int8_matmul", cases, sweep))

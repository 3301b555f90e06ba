"""Times matrix products of a few rows against cuBLAS (eager PyTorch) and torch.compile, in bf16.

    python benchmarks/kernels/small_matmul.py --out FILE [--only "1 row"] [--sweep]

The weights of a 1.24B Llama, which a decoding step reads once each, and two that leave multiprocessors idle. The
results belong in `redline/ops/small_matmul/tiles.py`: the fastest tiles of the sweep, or None where cuBLAS is faster.
"""

import sys
from collections.abc import Callable, Iterable
from functools import partial

import torch
from arms import Case, Run, forward, main, with_values
from torch import Tensor
from torch.nn import functional as F

from redline.ops.small_matmul import small_matmul, tiles

# (outputs, features): q with k and v, out, gate with up, down, the head; k alone; a router.
WEIGHTS = ((3072, 2048), (2048, 2048), (16_384, 2048), (2048, 8192), (128_256, 2048), (512, 2048), (64, 4096))
ROWS = (1, 2, 8, 16)
LARGEST_ERROR = 0.01


def case(rows: int, columns: int, depth: int) -> Case:
    x = torch.randn(rows, depth, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(columns, depth, device="cuda", dtype=torch.bfloat16)

    def expected() -> tuple[Tensor, ...]:
        return (x.float() @ w.float().t(),)

    functions: dict[str, Callable[[], Callable[..., Tensor]]] = {
        "eager": lambda: F.linear,
        "torch.compile": lambda: torch.compile(lambda x, w: F.linear(x, w), fullgraph=True, dynamic=False),
        "redline": lambda: partial(small_matmul, implementation="triton"),
    }
    return Case(
        name=f"small_matmul {rows} row{'s' * (rows > 1)}",
        sizes={"rows": rows, "outputs": columns, "depth": depth, "dtype": "bf16"},
        arms={name: lambda make=make: forward(make(), (x, w)) for name, make in functions.items()},
        expected=expected,
        largest_error=LARGEST_ERROR,
        needed_bytes=x.nbytes + w.nbytes + 2 * rows * columns,
    )


def cases() -> Iterable[Case]:
    for rows in ROWS:
        for columns, depth in WEIGHTS:
            yield case(rows, columns, depth)


def sweep() -> Iterable[Case]:
    for rows, choices in ((1, vector_tiles(2)), (16, block_tiles(16, 2, 2))):
        for columns, depth in WEIGHTS[:6]:
            plain, shape = case(rows, columns, depth), tiles.shape_of(rows, columns, depth, 2, 2)
            yield swept(plain, shape, choices, ("eager", "torch.compile"))


def vector_tiles(w_bytes: int) -> list[tiles.Tiles]:
    """Yields the tiles for one row in which a thread loads 16 bytes at once and holds at most 64 elements."""
    found = [
        tiles.Tiles(1, columns, depth, warps, 1)
        for columns in (1, 2, 4, 8, 16)
        for depth in (512, 1024, 2048, 4096)
        for warps in (1, 2, 4, 8)
    ]
    return [one for one in found if 16 // w_bytes <= one.depth // (32 * one.warps) and _numbers(one) <= 64]


def _numbers(one: tiles.Tiles) -> int:
    return one.columns * one.depth // (32 * one.warps)


def block_tiles(rows: int, x_bytes: int, w_bytes: int) -> list[tiles.Tiles]:
    """Yields the tiles for more rows that fit shared memory and keep enough loads of the weight in flight."""
    found = [
        tiles.Tiles(rows, columns, depth // w_bytes, warps, stages)
        for columns in (16, 32, 64)
        for depth in (128, 256, 512)
        for warps in (2, 4, 8)
        for stages in (3, 5)
    ]
    return [
        one
        for one in found
        if one.columns * one.depth * w_bytes * one.stages >= 16_384
        and (one.rows * x_bytes + one.columns * w_bytes) * one.depth * one.stages <= 200_000
    ]


def swept(plain: Case, shape: tiles.Shape, choices: list[tiles.Tiles], peers: tuple[str, ...]) -> Case:
    """Returns the case with the tiles as arms, next to those that they must beat."""
    build = plain.arms["redline"]
    arms: dict[str, Callable[[], Run]] = {name: plain.arms[name] for name in peers} | {"as shipped": build}
    for one in choices:
        values: dict[str, object] = {"MEASURED": {shape: one}}
        arms[str(one)] = lambda values=values, build=build: with_values(tiles, values, build())
    return Case(
        name=f"sweep of {plain.name}",
        sizes=plain.sizes,
        arms=arms,
        expected=plain.expected,
        largest_error=plain.largest_error,
        needed_bytes=plain.needed_bytes,
        needed_flop=plain.needed_flop,
    )


if __name__ == "__main__":
    sys.exit(main("small_matmul", cases, sweep))

"""Times RMSNorm, alone and with a residual, against eager PyTorch, torch.compile and Liger, in bf16.

    python benchmarks/kernels/rms_norm.py --out FILE [--only forward] [--sweep]

The widths of a 7B model, of a training step of a 124M model, of single tokens, and odd ones. Liger overwrites the
incoming gradient, so inputs are restored between turns.
"""

import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import torch
from arms import Case, Run, both, forward, kept, main, with_values
from torch import Tensor
from torch.nn import functional as F

from redline.ops.rms_norm import add_rms_norm, reference, rms_norm

EPS = 1e-6
SIZES = ((16384, 4096), (65536, 768), (16384, 2048), (4096, 8192), (64, 4096), (1, 4096), (4001, 1111))
# Error of bf16 against fp32: Llama's code rounds twice, and the gradient of the weight is a sum of rounded values.
LARGEST_ERROR = 0.02


def eager(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, EPS)


def eager_add(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return F.rms_norm(total, weight.shape, weight, EPS), total


def liger() -> Callable[..., Tensor]:
    from liger_kernel.transformers.functional import liger_rms_norm

    return lambda x, weight: liger_rms_norm(x, weight, EPS)


def liger_add() -> Callable[..., tuple[Tensor, Tensor]]:
    from liger_kernel.transformers.functional import liger_fused_add_rms_norm

    return lambda x, residual, weight: liger_fused_add_rms_norm(x, residual, weight, EPS)


def functions(add: bool) -> dict[str, Callable[[], Callable[..., Tensor | tuple[Tensor, ...]]]]:
    plain, ours = (eager_add, add_rms_norm) if add else (eager, rms_norm)
    return {
        "eager": lambda: plain,
        "torch.compile": lambda: torch.compile(plain, fullgraph=True, dynamic=False),
        "liger": liger_add if add else liger,
        "redline": lambda: partial(ours, eps=EPS, implementation="triton"),
    }


def case(rows: int, width: int, add: bool, backward: bool) -> Case:
    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda").bfloat16()

    inputs = tuple(drawn(rows, width).requires_grad_() for _ in range(2 if add else 1))
    inputs += (drawn(width).requires_grad_(),)
    grads = tuple(drawn(rows, width) for _ in range(2 if add else 1))
    exact = tuple(tensor.detach().float().requires_grad_() for tensor in inputs)

    def run(function: Callable[..., Tensor | tuple[Tensor, ...]], given: tuple[Tensor, ...] = inputs) -> Run:
        if not backward:
            return forward(function, given)
        return both(function, given, tuple(grad.to(given[0].dtype) for grad in grads))

    def expected() -> tuple[Tensor, ...]:
        return run(partial(reference.add_rms_norm if add else reference.rms_norm, eps=EPS), exact)()

    tensors = (4 + 4 * backward) if add else (2 + 3 * backward)
    return Case(
        name=f"{'add_' * add}rms_norm {'with backward' if backward else 'forward'}",
        sizes={"rows": rows, "width": width, "dtype": "bf16"},
        arms={name: lambda make=make: run(make()) for name, make in functions(add).items()},
        expected=expected,
        largest_error=LARGEST_ERROR,
        needed_bytes=tensors * rows * width * 2,
        restore=kept(*inputs, *grads) if backward else None,
    )


def cases() -> Iterable[Case]:
    for rows, width in SIZES:
        for add in (False, True):
            for backward in (False, True):
                yield case(rows, width, add, backward)


def sweep() -> Iterable[Case]:
    """Sweeps the tiles of forward, with and without a residual, then of backward."""
    from redline.ops.rms_norm import triton

    for rows, width in SIZES[:3]:
        forward_tiles = [triton.Tiles(n, warps) for n in (1, 2, 4) for warps in (1, 2, 4, 8)]
        backward_tiles = [
            triton.Tiles(n, warps, programs, stages)
            for n in (1, 2, 4)
            for warps in (4, 8)
            for programs in (2, 4, 8)
            for stages in (1, 3)
            if 8 <= n * triton.kernel.padded(width) // (32 * warps) <= 64 and programs * warps <= 32
        ]
        sum_tiles = [triton.SumTiles(*tiles) for tiles in ((128, 32, 4), (256, 16, 8), (512, 16, 16), (1024, 16, 16))]
        for name, choices, add, backward in (
            ("FORWARD_TILES", forward_tiles, False, False),
            # With a residual a program computes half of these rows.
            ("FORWARD_TILES", [replace(tiles, rows=2 * tiles.rows) for tiles in forward_tiles], True, False),
            ("BACKWARD_TILES", backward_tiles, False, True),
        ):
            plain = case(rows, width, add, backward)
            build = plain.arms["redline"]
            arms: dict[str, Callable[[], Run]] = {"as shipped": build}
            for tiles in choices:
                table: dict[str, object] = {name: {65536: tiles}}
                arms[str(tiles)] = lambda table=table, build=build: with_values(triton, table, build())
            for tiles in sum_tiles if backward else ():
                table = {"SUM_TILES": tiles}
                arms[str(tiles)] = lambda table=table, build=build: with_values(triton, table, build())
            yield replace(plain, name=f"sweep of {plain.name}", arms=arms)


if __name__ == "__main__":
    sys.exit(main("rms_norm", cases, sweep))

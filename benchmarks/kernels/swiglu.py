"""Times SwiGLU against eager PyTorch, torch.compile and Liger, in bf16.

    python benchmarks/kernels/swiglu.py --out FILE [--only forward] [--sweep]

The widths of training steps of a 7B and a 124M model, of single tokens, odd ones, and two halves of one tensor, whose
gradients autograd concatenates, except for "redline packed", which takes one tensor. Liger overwrites its inputs with
their gradients, so they are restored between turns.
"""

import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import torch
from arms import Case, Run, both, forward, kept, main, with_values
from torch import Tensor
from torch.nn import functional as F

from redline.ops.swiglu import packed_swiglu, reference, swiglu

SIZES = ((16384, 11008), (65536, 2048), (64, 11008), (1, 11008), (4001, 1111))
LARGEST_ERROR = 0.02
Gate = Callable[[Tensor, Tensor], Tensor]


def eager(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def liger() -> Gate:
    from liger_kernel.transformers.functional import liger_swiglu

    return liger_swiglu


GATES: dict[str, Callable[[], Gate]] = {
    "eager": lambda: eager,
    "torch.compile": lambda: torch.compile(eager, fullgraph=True, dynamic=False),
    "liger": liger,
    "redline": lambda: partial(swiglu, implementation="triton"),
}


def case(rows: int, width: int, halves: bool, backward: bool) -> Case:
    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda").bfloat16()

    if halves:
        inputs = (drawn(rows, 2 * width).requires_grad_(),)
    else:
        inputs = (drawn(rows, width).requires_grad_(), drawn(rows, width).requires_grad_())
    grad = drawn(rows, width)

    def run(gate: Gate, given: tuple[Tensor, ...] = inputs) -> Run:
        function = (lambda x: gate(*x.chunk(2, -1))) if halves else gate
        return both(function, given, (grad.to(given[0].dtype),)) if backward else forward(function, given)

    def packed() -> Run:
        function = partial(packed_swiglu, implementation="triton")
        return both(function, inputs, (grad,)) if backward else forward(function, inputs)

    def expected() -> tuple[Tensor, ...]:
        return run(reference.swiglu, tuple(tensor.detach().float().requires_grad_() for tensor in inputs))()

    return Case(
        name=f"swiglu{' of halves' * halves} {'with backward' if backward else 'forward'}",
        sizes={"rows": rows, "width": width, "dtype": "bf16"},
        arms={name: lambda make=make: run(make()) for name, make in GATES.items()}
        | ({"redline packed": packed} if halves else {}),
        expected=expected,
        largest_error=LARGEST_ERROR,
        needed_bytes=(3 + 5 * backward) * rows * width * 2,
        restore=kept(*inputs) if backward else None,
    )


def cases() -> Iterable[Case]:
    for rows, width in SIZES:
        for halves in (False, True):
            for backward in (False, True):
                yield case(rows, width, halves, backward)


def sweep() -> Iterable[Case]:
    """Sweeps the tiles of forward, then of backward."""
    from redline.ops.swiglu import triton

    for rows, width in SIZES[:2]:
        for halves in (False, True):
            for direction, backward in (("forward", False), ("backward", True)):
                plain = case(rows, width, halves, backward)
                build = plain.arms["redline packed" if halves else "redline"]
                arms: dict[str, Callable[[], Run]] = {"as shipped": build}
                for block in (1024, 2048, 4096, 8192):
                    for warps in (2, 4, 8, 16):
                        tiles = triton.Tiles(block, warps)
                        table: dict[str, object] = {"TILES": triton.TILES | {direction: tiles}}
                        arms[str(tiles)] = lambda table=table, build=build: with_values(triton, table, build())
                yield replace(plain, name=f"sweep of {plain.name}", arms=arms)


if __name__ == "__main__":
    sys.exit(main("swiglu", cases, sweep))

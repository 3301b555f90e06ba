"""Times cross-entropy against eager PyTorch, torch.compile and Liger, in bf16.

    python benchmarks/kernels/cross_entropy.py --out FILE [--only forward+backward] [--sweep]

Logits of Llama 3, of a training step of a 124M model, and of an odd vocabulary. The other arms compute in fp32, as
training does. Liger overwrites the logits with their gradient, so they are restored between turns.
"""

import sys
from collections.abc import Callable, Iterable
from functools import partial

import torch
from arms import Case, Run, both, forward, kept, main, with_values
from torch import Tensor
from torch.nn import functional as F

from redline.ops.cross_entropy import cross_entropy, reference

SIZES = ((8192, 128_256), (65_536, 50_304), (8192, 32_000), (4096, 50_257))
# Error of bf16 gradients against fp32.
LARGEST_ERROR = 0.01


def eager(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), target)


def liger() -> Callable[..., Tensor]:
    from liger_kernel.transformers.functional import liger_cross_entropy

    return liger_cross_entropy


FUNCTIONS: dict[str, Callable[[], Callable[..., Tensor]]] = {
    "eager": lambda: eager,
    "torch.compile": lambda: torch.compile(eager, fullgraph=True, dynamic=False),
    "liger": liger,
    "redline": lambda: partial(cross_entropy, implementation="triton"),
}


def case(rows: int, classes: int, backward: bool) -> Case:
    logits = torch.randn(rows, classes, device="cuda", dtype=torch.bfloat16).requires_grad_()
    target = torch.randint(classes, (rows,), device="cuda")
    grad = torch.ones((), device="cuda")

    def run(function: Callable[..., Tensor], given: Tensor = logits) -> Run:
        return both(function, (given, target), (grad,)) if backward else forward(function, (given, target))

    def expected() -> tuple[Tensor, ...]:
        return run(reference.cross_entropy, logits.detach().float().requires_grad_())()

    return Case(
        name=f"cross_entropy {'forward+backward' if backward else 'forward'}",
        sizes={"rows": rows, "classes": classes, "dtype": "bf16"},
        arms={name: lambda make=make: run(make()) for name, make in FUNCTIONS.items()},
        expected=expected,
        largest_error=LARGEST_ERROR,
        # Forward reads the logits once; backward reads and writes them once.
        needed_bytes=(3 if backward else 1) * logits.nbytes,
        restore=kept(logits),
    )


def cases() -> Iterable[Case]:
    for rows, classes in SIZES:
        for backward in (False, True):
            yield case(rows, classes, backward)


def sweep() -> Iterable[Case]:
    """Sweeps the tiles of forward, then of backward."""
    from redline.ops.cross_entropy import triton

    choices = [
        triton.Tiles(classes, warps) for classes in (1024, 2048, 4096, 8192, 16_384) for warps in (1, 2, 4, 8, 16)
    ]
    choices = [tiles for tiles in choices if 8 <= tiles.classes // (32 * tiles.warps) <= 64]
    for rows, classes in SIZES[:2]:
        for name, backward in (("FORWARD_TILES", False), ("GRADIENT_TILES", True)):
            plain = case(rows, classes, backward)
            build = plain.arms["redline"]
            arms: dict[str, Callable[[], Run]] = {"as shipped": build}
            for tiles in choices:
                table: dict[str, object] = {name: {2: tiles}}
                arms[str(tiles)] = lambda table=table, build=build: with_values(triton, table, build())
            yield Case(
                name=f"sweep of {plain.name}",
                sizes=plain.sizes,
                arms=arms,
                expected=plain.expected,
                largest_error=LARGEST_ERROR,
                needed_bytes=plain.needed_bytes,
            )


if __name__ == "__main__":
    sys.exit(main("cross_entropy", cases, sweep))

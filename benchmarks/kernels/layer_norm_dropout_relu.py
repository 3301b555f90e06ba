"""Times fused LayerNorm, dropout and ReLU against eager PyTorch, torch.compile and Liger's LayerNorm, in bf16.

    python benchmarks/kernels/layer_norm_dropout_relu.py --out FILE [--only forward] [--sweep]

With dropout each arm draws its own mask, so means over rows and the gradients of weight and bias are compared, which
hardly depend on the mask.
"""

import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import torch
from arms import Case, Run, both, forward, kept, main, with_values
from torch import Tensor
from torch.nn import functional as F

from redline.ops.layer_norm_dropout_relu import layer_norm_dropout_relu

EPS = 1e-5
SIZES = ((16384, 4096), (65536, 768), (64, 4096), (4001, 1111))
LARGEST_ERROR = 0.02
LARGEST_ERROR_OF_MEANS = 0.1
# Means over fewer rows are too random.
LEAST_ROWS_TO_JUDGE = 1000
Layer = Callable[[Tensor, Tensor, Tensor], Tensor]


def eager(p: float) -> Layer:
    def layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.dropout(F.layer_norm(x, weight.shape, weight, bias, EPS), p).relu()

    return layer


def liger(p: float) -> Layer:
    from liger_kernel.transformers.functional import liger_layer_norm

    return lambda x, weight, bias: F.dropout(liger_layer_norm(x, weight, bias, EPS), p).relu()


def of_means(results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Returns the column means of the output, and the gradients of weight and bias."""
    out, *gradients = results
    return (out.float().mean(0), *gradients[1:])


def case(rows: int, width: int, p: float, backward: bool) -> Case:
    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda").bfloat16()

    inputs = (drawn(rows, width).requires_grad_(), drawn(width).requires_grad_(), drawn(width).requires_grad_())
    # All of one sign: otherwise the gradients of weight and bias would be random.
    grad = (0.5 + torch.rand(rows, width, device="cuda")).bfloat16()

    def run(layer: Layer, given: tuple[Tensor, ...] = inputs) -> Run:
        return both(layer, given, (grad.to(given[0].dtype),)) if backward else forward(layer, given)

    def expected() -> tuple[Tensor, ...]:
        exact = tuple(tensor.detach().float().requires_grad_() for tensor in inputs)
        return run(partial(layer_norm_dropout_relu, p=p, eps=EPS, implementation="reference"), exact)()

    return Case(
        name=f"layer_norm_dropout_relu {'with backward' if backward else 'forward'}",
        sizes={"rows": rows, "width": width, "p": p, "dtype": "bf16"},
        arms={
            "eager": lambda: run(eager(p)),
            "torch.compile": lambda: run(torch.compile(eager(p), fullgraph=True, dynamic=False)),
            "liger": lambda: run(liger(p)),
            "redline": lambda: run(partial(layer_norm_dropout_relu, p=p, eps=EPS, implementation="triton")),
        },
        expected=expected,
        largest_error=LARGEST_ERROR_OF_MEANS if p else LARGEST_ERROR,
        needed_bytes=(2 + 3 * backward) * rows * width * 2,
        restore=kept(*inputs, grad) if backward else None,
        judged=of_means if p else None,
    )


def cases() -> Iterable[Case]:
    for rows, width in SIZES:
        for p in (0.0, 0.1):
            if p and rows < LEAST_ROWS_TO_JUDGE:
                continue
            for backward in (False, True):
                yield case(rows, width, p, backward)


def sweep() -> Iterable[Case]:
    """Sweeps the tiles of forward, then of backward, with dropout."""
    from redline.ops.layer_norm_dropout_relu import triton

    for rows, width in SIZES[:2]:
        forward_tiles = [triton.Tiles(n, warps) for n in (1, 2) for warps in (2, 4, 8)]
        backward_tiles = [
            triton.Tiles(1, warps, programs, stages)
            for warps in (4, 8, 16)
            for programs in (1, 2, 4)
            for stages in (1, 3)
        ]
        for name, choices, backward in (
            ("FORWARD_TILES", forward_tiles, False),
            ("BACKWARD_TILES", backward_tiles, True),
        ):
            plain = case(rows, width, 0.1, backward)
            build = plain.arms["redline"]
            arms: dict[str, Callable[[], Run]] = {"as shipped": build}
            for tiles in choices:
                table: dict[str, object] = {name: {65536: tiles}}
                arms[str(tiles)] = lambda table=table, build=build: with_values(triton, table, build())
            yield replace(plain, name=f"sweep of {plain.name}", arms=arms)


if __name__ == "__main__":
    sys.exit(main("layer_norm_dropout_relu", cases, sweep))

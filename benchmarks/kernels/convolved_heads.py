"""Times the convolution, SiLU and normalization of a neural memory layer against PyTorch, in bf16.

    python benchmarks/kernels/convolved_heads.py --out FILE [--only forward] [--sweep]

65,536 tokens, 12 heads of 64 channels and four taps, in rows of 2K and 8K, with and without documents of 512 tokens;
one case has other heads. Liger has no such kernel.
"""

import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from itertools import product

import torch
from arms import Case, Run, both, forward, main, with_values
from torch import Tensor

from redline.ops.convolved_heads import convolved_heads, reference

TOKENS, TAPS = 65_536, 4
DOCUMENT_TOKENS = 512
# Error of bf16 against fp32. The gradient of the taps is a sum over all tokens.
LARGEST_ERROR = 0.02


def case(length: int, heads: int, key_dim: int, value_dim: int, packed: bool, backward: bool) -> Case:
    rows, channels = TOKENS // length, heads * (2 * key_dim + value_dim)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda").bfloat16()

    inputs = tuple(
        t.requires_grad_()
        for t in (drawn(rows, length, channels), drawn(TAPS, channels), drawn(rows, TAPS - 1, channels))
    )
    grads = tuple(drawn(rows, length, heads, dim) for dim in (key_dim, key_dim, value_dim))
    numbers = (torch.arange(length, device="cuda") // DOCUMENT_TOKENS).expand(rows, -1) if packed else None

    def run(function: Callable[..., tuple[Tensor, ...]], given: tuple[Tensor, ...] = inputs) -> Run:
        def of_inputs(*tensors: Tensor) -> tuple[Tensor, ...]:
            return function(*tensors, heads, key_dim, numbers)

        return (
            both(of_inputs, given, tuple(p.to(given[0].dtype) for p in grads))
            if backward
            else forward(of_inputs, given)
        )

    def expected() -> tuple[Tensor, ...]:
        return run(reference.convolved_heads, tuple(t.detach().float().requires_grad_() for t in inputs))()

    return Case(
        name=f"convolved_heads {'forward+backward' if backward else 'forward'}",
        sizes={
            "rows": rows,
            "tokens": length,
            "heads": heads,
            "keys": key_dim,
            "values": value_dim,
            "packed": packed,
            "dtype": "bf16",
        },
        arms={
            "redline": lambda: run(partial(convolved_heads, implementation="triton")),
            "eager": lambda: run(reference.convolved_heads),
            "torch.compile": lambda: run(torch.compile(reference.convolved_heads, fullgraph=True, dynamic=False)),
        },
        expected=expected,
        largest_error=LARGEST_ERROR,
        # Forward reads and writes once; backward reads inputs and gradients, and writes as much again.
        needed_bytes=(2 + 3 * backward) * inputs[0].nbytes,
    )


def cases() -> Iterable[Case]:
    for backward in (True, False):
        for length, heads, key_dim, value_dim, packed in (
            (2048, 12, 64, 64, False),
            (8192, 12, 64, 64, False),
            (2048, 12, 64, 64, True),
            (2048, 6, 96, 128, False),
        ):
            yield case(length, heads, key_dim, value_dim, packed, backward)


def sweep() -> Iterable[Case]:
    from redline.ops.convolved_heads import triton

    few = ((16, 4), (32, 4), (32, 8), (64, 4), (64, 8))
    many = ((32, 8), (64, 4), (64, 8), (64, 16), (128, 16))
    for what, tiles, widths in (("FORWARD", few, ()), ("SUMS", few, ()), ("INPUTS", many, (64, 128))):
        plain = case(2048, 12, 64, 64, False, backward=what != "FORWARD")
        build = plain.arms["redline"]
        arms: dict[str, Callable[[], Run]] = {"as shipped": build}
        for (tokens, warps), columns in product(tiles, widths or (triton.COLUMNS,)):
            values: dict[str, object] = {what: (tokens, warps), "COLUMNS": columns}
            arms[f"{tokens} tokens, {warps} warps, {columns} columns"] = lambda values=values, build=build: with_values(
                triton, values, build()
            )
        yield replace(plain, name=f"sweep of {what} of {plain.name}", arms=arms)


if __name__ == "__main__":
    sys.exit(main("convolved_heads", cases, sweep))

"""Times rotary embedding of queries and keys against eager PyTorch, torch.compile and Liger, in bf16.

    python benchmarks/kernels/rope.py --out FILE [--only forward] [--sweep]

Heads of an 8B model and of a 124M model in training, of a single token, and odd ones. Eager is the code of
transformers, with tables in bf16. Liger rotates its inputs in place, so they are restored between turns.
"""

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

import torch
from arms import Case, Run, both, forward, kept, main, with_values
from torch import Tensor

from redline.ops.rope import reference, rope, rope_tables

# Tables in bf16 keep only eight bits of each cosine.
LARGEST_ERROR = 0.02
Turn = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Size:
    batch: int
    tokens: int
    q_heads: int
    k_heads: int
    channels: int


SIZES = (Size(8, 2048, 32, 8, 128), Size(32, 2048, 12, 12, 64), Size(1, 1, 32, 8, 128), Size(3, 777, 9, 3, 80))


def as_transformers(cos: Tensor, sin: Tensor) -> Turn:
    wide_cos, wide_sin = (torch.cat((table, table), -1).bfloat16()[None, :, None] for table in (cos, sin))

    def half_turned(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return torch.cat((-second, first), -1)

    def turn(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return q * wide_cos + half_turned(q) * wide_sin, k * wide_cos + half_turned(k) * wide_sin

    return turn


def liger(cos: Tensor, sin: Tensor) -> Turn:
    from liger_kernel.transformers.functional import liger_rope

    wide_cos, wide_sin = (torch.cat((table, table), -1).bfloat16()[None] for table in (cos, sin))

    def turn(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        q, k = liger_rope(q.transpose(1, 2), k.transpose(1, 2), wide_cos, wide_sin)
        return q.transpose(1, 2), k.transpose(1, 2)

    return turn


def case(size: Size, backward: bool) -> Case:
    def drawn(heads: int) -> Tensor:
        return torch.randn(size.batch, size.tokens, heads, size.channels, device="cuda").bfloat16()

    inputs = (drawn(size.q_heads).requires_grad_(), drawn(size.k_heads).requires_grad_())
    grads = (drawn(size.q_heads), drawn(size.k_heads))
    cos, sin = rope_tables(size.tokens, size.channels, 500_000.0, device="cuda")

    def run(turn: Turn, given: tuple[Tensor, ...] = inputs) -> Run:
        if not backward:
            return forward(turn, given)
        return both(turn, given, tuple(grad.to(given[0].dtype) for grad in grads))

    def expected() -> tuple[Tensor, ...]:
        exact = tuple(tensor.detach().float().requires_grad_() for tensor in inputs)
        return run(partial(reference.rope, cos_SD=cos, sin_SD=sin), exact)()

    plain = as_transformers(cos, sin)
    ours = partial(rope, cos_SD=cos, sin_SD=sin, implementation="triton")
    numbers = size.batch * size.tokens * (size.q_heads + size.k_heads) * size.channels
    return Case(
        name=f"rope {'with backward' if backward else 'forward'}",
        sizes={**vars(size), "dtype": "bf16"},
        arms={
            "eager": lambda: run(plain),
            "torch.compile": lambda: run(torch.compile(plain, fullgraph=True, dynamic=False)),
            "liger": lambda: run(liger(cos, sin)),
            "redline": lambda: run(ours),
        },
        expected=expected,
        largest_error=LARGEST_ERROR,
        needed_bytes=(2 + 2 * backward) * numbers * 2,
        restore=kept(*inputs, *grads),
    )


def cases() -> Iterable[Case]:
    for size in SIZES:
        for backward in (False, True):
            yield case(size, backward)


def sweep() -> Iterable[Case]:
    """Sweeps the elements that a program holds at once, and its warps."""
    from redline.ops.rope import triton

    for size in SIZES[:2]:
        plain = case(size, False)
        build = plain.arms["redline"]
        arms: dict[str, Callable[[], Run]] = {"as shipped": build}
        for block in (256, 512, 1024, 2048, 4096):
            for warps in (1, 2, 4, 8):
                table: dict[str, object] = {"BLOCK": block, "WARPS": {block: warps}}
                arms[f"block={block} warps={warps}"] = lambda table=table, build=build: with_values(
                    triton, table, build()
                )
        yield replace(plain, name=f"sweep of {plain.name}", arms=arms)


if __name__ == "__main__":
    sys.exit(main("rope", cases, sweep))

"""Times writing tokens into a bank of slots against the reference and torch.compile, in bf16.

    python benchmarks/kernels/slot_write.py --out FILE [--with torch.compile]

32 tokens, a quarter of a segment of 128, are written into full banks of a 124M model, for one sequence and for eight.
torch.compile unrolls the loop, takes minutes, and runs on request. Liger has no such kernel.
"""

import sys
from collections.abc import Callable, Iterable
from functools import partial

import torch
from arms import Case, Run, main
from torch import Tensor
from torch.nn import functional as F

from redline.ops.slot_write import Slots, reference, slot_write

TOKENS, HEADS, SIZE = 32, 12, 64
THRESHOLD = 0.9
# Keys and values are bf16 means, which each merge rounds once.
LARGEST_ERROR = 0.01


def case(batch: int, slots: int) -> Case:
    directions = F.normalize(torch.randn(2 * slots, HEADS, SIZE, device="cuda"), dim=-1)

    def keys(count: int) -> Tensor:
        near = directions[torch.randint(len(directions), (batch, count), device="cuda")]
        return (near + 0.03 * torch.randn_like(near)).bfloat16()

    numbers = [torch.rand(batch, slots, device="cuda") for _ in range(3)]
    held = (keys(slots), keys(slots), torch.randn(batch, slots, device="cuda"), 1 + numbers[0].round(), *numbers[1:])
    score = torch.randn(batch, TOKENS, device="cuda").sort(dim=1, descending=True).values
    offered = (keys(TOKENS), keys(TOKENS), score, torch.ones_like(score, dtype=torch.bool), THRESHOLD)

    def run(write: Callable[..., tuple[Slots, object]]) -> Run:
        def call() -> tuple[Tensor, ...]:
            with torch.no_grad():
                return tuple(write(Slots(*held), *offered)[0])

        return call

    return Case(
        name="slot_write forward",
        sizes={"batch": batch, "slots": slots, "tokens": TOKENS, "heads": HEADS, "head_size": SIZE, "dtype": "bf16"},
        arms={
            "eager": lambda: run(reference.slot_write),
            "torch.compile": lambda: run(torch.compile(reference.slot_write, fullgraph=True, dynamic=False)),
            "redline": lambda: run(partial(slot_write, implementation="triton")),
        },
        expected=run(reference.slot_write),
        largest_error=LARGEST_ERROR,
        on_request=("torch.compile",),
    )


def cases() -> Iterable[Case]:
    for batch in (1, 8):
        for slots in (128, 512):
            yield case(batch, slots)


if __name__ == "__main__":
    sys.exit(main("slot_write", cases))

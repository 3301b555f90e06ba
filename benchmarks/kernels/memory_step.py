"""Times one decoding step of a neural memory layer, between its projections, against its reference and torch.compile.

    python benchmarks/kernels/memory_step.py --out FILE

In bf16, with the heads of a 124M model and larger ones, for one sequence and for thirty-two. Liger has no such kernel.
"""

import sys
from collections.abc import Callable, Iterable
from functools import partial

import torch
from arms import Case, Run, main
from torch import Tensor

from redline.ops.memory_step import Learned, Projected, memory_step, reference

TAPS, EPS = 4, 1e-6
# The reference rounds a dozen times, and RMSNorm amplifies the error of the small output of a full memory.
LARGEST_ERROR = 0.1


def case(batch: int, heads: int, size: int) -> Case:
    channels = 3 * heads * size

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda").bfloat16()

    token = Projected(drawn(batch, channels), drawn(batch, heads), drawn(batch, heads), drawn(batch, heads * size))
    learned = Learned(drawn(TAPS, channels), drawn(heads), drawn(heads), drawn(size))
    recent, state = drawn(batch, TAPS - 1, channels), torch.randn(batch, heads, size, size, device="cuda")
    exact = Projected(*(one.float() for one in token)), Learned(*(one.float() for one in learned)), recent.float()

    def run(step: Callable[..., tuple[Tensor, ...]], given: tuple[object, ...] = (token, learned, recent)) -> Run:
        def call() -> tuple[Tensor, ...]:
            with torch.no_grad():
                return step(*given, state, EPS)

        return call

    return Case(
        name="memory_step forward",
        sizes={"batch": batch, "heads": heads, "head_size": size, "taps": TAPS, "dtype": "bf16"},
        arms={
            "eager": lambda: run(reference.memory_step),
            "torch.compile": lambda: run(torch.compile(reference.memory_step, fullgraph=True, dynamic=False)),
            "redline": lambda: run(partial(memory_step, implementation="triton")),
        },
        expected=run(reference.memory_step, exact),
        largest_error=LARGEST_ERROR,
        needed_bytes=2 * state.nbytes,
    )


def cases() -> Iterable[Case]:
    for batch in (1, 32):
        for heads, size in ((12, 64), (16, 128)):
            yield case(batch, heads, size)


if __name__ == "__main__":
    sys.exit(main("memory_step", cases))

"""Times the Titans memory against its reference, in bf16, with and without documents.

    python benchmarks/kernels/titans_memory.py --out FILE [--only forward] [--with torch.compile] [--sweep]

Width 768 in 12 heads, four sequences of 128 to 32K tokens. Documents split chunks in two, which the rows with documents
show. The reference runs chunk by chunk and is skipped at the longest. torch.compile unrolls it into one step per chunk
(2K tokens did not compile within five minutes, 512 not within one and a half), so it runs only at the shortest length
and on request. Liger has no such kernel.
"""

import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import torch
from arms import Case, Run, both, forward, main, with_values
from torch import Tensor
from torch.nn import functional as F

from redline.ops.titans_memory import TitansState, reference, titans_memory

BATCH, HEADS, SIZE = 4, 12, 64
LENGTHS = (128, 2048, 8192, 32768)
DOCUMENT_TOKENS = 700
# Error of bf16 against fp32: values are rounded several times.
LARGEST_ERROR = 0.04


def case(tokens: int, packed: bool, backward: bool, batch: int = BATCH) -> Case:
    def drawn() -> Tensor:
        return torch.randn((batch, tokens, HEADS, SIZE), device="cuda")

    def gate(largest: float) -> Tensor:
        return torch.rand((batch, tokens, HEADS), device="cuda") * largest

    q, k = (F.normalize(drawn(), dim=-1).bfloat16() for _ in range(2))
    gates = (gate(0.05), gate(0.9), gate(0.1))
    inputs = tuple(tensor.requires_grad_() for tensor in (q, k, drawn().bfloat16(), *gates))
    grad = drawn().bfloat16()
    documents = (torch.arange(tokens, device="cuda") // DOCUMENT_TOKENS).int().expand(batch, -1) if packed else None

    def run(function: Callable[..., tuple[Tensor, TitansState]], given: tuple[Tensor, ...] = inputs) -> Run:
        def output(*tensors: Tensor) -> Tensor:
            return function(*tensors, documents_BS=documents)[0]

        return both(output, given, (grad.to(given[0].dtype),)) if backward else forward(output, given)

    def expected() -> tuple[Tensor, ...]:
        return run(reference.chunked, tuple(tensor.detach().float().requires_grad_() for tensor in inputs))()

    arms: dict[str, Callable[[], Run]] = {"redline": lambda: run(partial(titans_memory, implementation="triton"))}
    if tokens < LENGTHS[-1]:
        arms["eager"] = lambda: run(reference.chunked)
    if tokens == LENGTHS[0] and not packed:
        arms["torch.compile"] = lambda: run(torch.compile(reference.chunked, fullgraph=True, dynamic=False))
    # Forward reads q, k and v and writes the output; backward reads them and its gradient, and writes three gradients.
    tensors = 4 + 7 * backward
    return Case(
        name=f"titans_memory {'forward+backward' if backward else 'forward'}",
        sizes={"batch": batch, "tokens": tokens, "heads": HEADS, "head_size": SIZE, "packed": packed, "dtype": "bf16"},
        arms=arms,
        expected=expected,
        largest_error=LARGEST_ERROR,
        needed_bytes=tensors * q.nbytes,
        on_request=("torch.compile",),
    )


def cases() -> Iterable[Case]:
    for backward in (True, False):
        for tokens in LENGTHS:
            for packed in (False, True):
                yield case(tokens, packed, backward)


def sweep() -> Iterable[Case]:
    """Sweeps tiles for many sequences, and for one long sequence that leaves most of the device idle."""
    for tokens, batch in ((2048, 32), (8192, BATCH), (32768, 1)):
        yield tiles_of(case(tokens, packed=True, backward=True, batch=batch))


def tiles_of(plain: Case) -> Case:
    from redline.ops.titans_memory import triton

    build, shipped = plain.arms["redline"], triton.TILES[2, SIZE]
    choices = [replace(shipped, warps=8), replace(shipped, block=32)]
    choices += [
        replace(shipped, values=values, state_warps=warps, stages=stages)
        for values in (16, 32, 64)
        for warps in (4, 8)
        for stages in (1, 2, 3)
    ]
    arms: dict[str, Callable[[], Run]] = {"as shipped": build}
    for tiles in choices:
        table: dict[str, object] = {"TILES": {**triton.TILES, (2, SIZE): tiles}, "FINE_VALUES": tiles.values}
        arms[str(tiles)] = lambda table=table, build=build: with_values(triton, table, build())
    return replace(plain, name=f"sweep of {plain.name}", arms=arms)


if __name__ == "__main__":
    sys.exit(main("titans_memory", cases, sweep))

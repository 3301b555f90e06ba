"""Times the gated delta rule against its reference, and against softmax attention of the same size, in bf16.

    python benchmarks/kernels/gated_delta_rule.py --out FILE [--only forward] [--with torch.compile] [--sweep]

Width 768 in 12 heads, four sequences of 2K to 32K tokens; other heads at 8K. The cost per token is constant for the
rule and grows for causal attention, so the rows show from which length the rule is faster. torch.compile unrolls the
reference into one step per chunk, which takes minutes, so it runs only at the shortest length and on request. Liger has
no such kernel.
"""

import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import torch
from arms import Case, Run, both, forward, main, with_values
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from redline.ops.gated_delta_rule import gated_delta_rule, reference

BATCH, HEADS, SIZE = 4, 12, 64
LENGTHS = (2048, 4096, 8192, 16384, 32768)
OTHER_HEADS = ((6, 128), (8, 96))
# Error of bf16 against fp32: values are rounded several times, and the gradient of g is a difference of sums.
LARGEST_ERROR = 0.04
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


def output(function: Callable[..., tuple[Tensor, Tensor]], *inputs: Tensor) -> Tensor:
    return function(*inputs)[0]


def case(tokens: int, heads: int, size: int, backward: bool, batch: int = BATCH) -> Case:
    def drawn() -> Tensor:
        return torch.randn((batch, tokens, heads, size), device="cuda")

    q, k = (F.normalize(drawn(), dim=-1).bfloat16() for _ in range(2))
    g, beta = (
        -torch.rand((batch, tokens, heads), device="cuda") * 0.1,
        torch.rand((batch, tokens, heads), device="cuda"),
    )
    inputs = tuple(tensor.requires_grad_() for tensor in (q, k, drawn().bfloat16(), g, beta))
    grad = drawn().bfloat16()

    def run(function: Callable[..., tuple[Tensor, Tensor]], given: tuple[Tensor, ...] = inputs) -> Run:
        of_output = partial(output, function)
        return both(of_output, given, (grad.to(given[0].dtype),)) if backward else forward(of_output, given)

    def expected() -> tuple[Tensor, ...]:
        return run(reference.chunked, tuple(tensor.detach().float().requires_grad_() for tensor in inputs))()

    arms: dict[str, Callable[[], Run]] = {
        "eager": lambda: run(reference.chunked),
        "redline": lambda: run(partial(gated_delta_rule, implementation="triton")),
    }
    if tokens == LENGTHS[0]:
        arms["torch.compile"] = lambda: run(torch.compile(reference.chunked, fullgraph=True, dynamic=False))
    # Forward reads q, k and v and writes the output; backward reads them and its gradient, and writes three gradients.
    tensors = 4 + 7 * backward
    return Case(
        name=f"gated_delta_rule {'forward+backward' if backward else 'forward'}",
        sizes={"batch": batch, "tokens": tokens, "heads": heads, "head_size": size, "dtype": "bf16"},
        arms=arms,
        expected=expected,
        largest_error=LARGEST_ERROR,
        needed_bytes=tensors * q.nbytes,
        on_request=("torch.compile",),
    )


def attention(tokens: int, heads: int, size: int, backward: bool) -> Case:
    """Returns the arms of softmax attention of the same size."""
    shape = (BATCH, tokens, heads, size)
    inputs = tuple(torch.randn(shape, device="cuda").bfloat16().requires_grad_() for _ in range(3))
    grad = torch.randn(shape, device="cuda").bfloat16()

    def run(backend: SDPBackend) -> Run:
        def attend(*given: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                q, k, v = (tensor.transpose(1, 2) for tensor in given)
                return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

        return both(attend, inputs, (grad,)) if backward else forward(attend, inputs)

    return Case(
        name=f"attention {'forward+backward' if backward else 'forward'}",
        sizes={"batch": BATCH, "tokens": tokens, "heads": heads, "head_size": size, "dtype": "bf16"},
        arms={name: lambda backend=backend: run(backend) for name, backend in BACKENDS.items()},
        expected=run(SDPBackend.EFFICIENT_ATTENTION),
        largest_error=LARGEST_ERROR,
        needed_flop=(3.5 if backward else 1) * 2 * BATCH * heads * tokens**2 * size,
    )


def cases() -> Iterable[Case]:
    for backward in (True, False):
        for tokens in LENGTHS:
            yield case(tokens, HEADS, SIZE, backward)
            yield attention(tokens, HEADS, SIZE, backward)
        for heads, size in OTHER_HEADS:
            yield case(8192, heads, size, backward)
            yield attention(8192, heads, size, backward)


def sweep() -> Iterable[Case]:
    """Sweeps the tiles of all kernels, for inputs that fill the device and for inputs that do not.

    That pass has a program for each head of each text and block of values (768 for 32 texts in blocks of 32, 96 for
    four and 24 for one), and goes through the chunks one after the other; smaller blocks make more programs, each of
    which reads all keys.
    """
    from redline.ops.gated_delta_rule import triton

    sizes = (
        (LENGTHS[0], HEADS, SIZE, 32),
        (LENGTHS[0], HEADS, SIZE, BATCH),
        (LENGTHS[-1], HEADS, SIZE, 1),
        (8192, HEADS, SIZE, BATCH),
        (8192, *OTHER_HEADS[0], BATCH),
    )
    for tokens, heads, size, batch in sizes:
        shipped = triton.TILES[2, size]
        choices = [replace(shipped, warps=warps) for warps in (2, 8)]
        choices += [replace(shipped, block=block) for block in (32, 128)]
        choices += [replace(shipped, chunk=32)]
        choices += [
            replace(shipped, values=values, state_warps=warps, stages=stages)
            for values in (16, 32, 64)
            for warps in (2, 4, 8)
            for stages in (1, 2, 3)
        ]
        for backward in (False, True):
            plain = case(tokens, heads, size, backward, batch)
            build = plain.arms["redline"]
            arms: dict[str, Callable[[], Run]] = {"as shipped": build}
            for tiles in choices:
                table: dict[str, object] = {"TILES": {**triton.TILES, (2, size): tiles}, "RECUT_FOR": set()}
                arms[str(tiles)] = lambda table=table, build=build: with_values(triton, table, build())
            yield replace(plain, name=f"sweep of {plain.name}", arms=arms)


if __name__ == "__main__":
    sys.exit(main("gated_delta_rule", cases, sweep))

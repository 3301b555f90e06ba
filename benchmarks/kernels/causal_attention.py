"""Times causal attention against PyTorch's fused kernels, with and without deterministic gradients, in bf16.

    python benchmarks/kernels/causal_attention.py --out FILE [--only forward] [--sweep]

Each case has 65,536 tokens: rows of 2K and 8K, documents of about 700 tokens packed into them, and a window; and rows
of 8K and 32K with a near window and far keys, as a memory model with slots trains. Arms named deterministic run under
`torch.use_deterministic_algorithms`, where cuDNN is not available; Redline is always deterministic. The reference, also
with torch.compile, stores all scores and runs only if they fit. Liger has no such kernel.
"""

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

import torch
from arms import Case, Run, both, forward, main, with_values
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from redline.models.memory.config import TitanConfig
from redline.models.memory.token_positions import TokenPositions
from redline.models.memory.windowed_attention import windowed_attention
from redline.nn.causal_attention import causal_attention as attention_of_a_layer
from redline.nn.packing import Packing
from redline.ops.causal_attention import causal_attention, reference
from redline.training.determinism import deterministic

TOKENS = 65_536
DOCUMENT_TOKENS = 700
# For bf16: probabilities are rounded before the product with the values, and again in backward.
LARGEST_ERROR = 0.02
# For fp32: products are sums of three TF32 products, and sums are rounded down.
LARGEST_ERROR_FP32 = 1e-4
# The reference stores all scores.
PLAIN_TOKENS = 2048


@dataclass(frozen=True)
class Size:
    length: int
    heads: int = 12
    key_heads: int = 12
    head_size: int = 64
    documents: bool = False
    window: int | None = None
    tokens: int = TOKENS


SIZES = (
    Size(2048),
    Size(8192),
    Size(2048, documents=True),
    Size(8192, documents=True),
    Size(8192, window=1024),
    Size(8192, 32, 8, 128),
    Size(8192, 32, 8, 128, documents=True),
    Size(PLAIN_TOKENS, tokens=PLAIN_TOKENS),
)


def packing_of(size: Size) -> Packing:
    """Returns one document per row, or several of random lengths."""
    shape = (size.tokens // size.length, size.length)
    if not size.documents:
        return Packing.of(torch.zeros(shape, dtype=torch.int64)).to("cuda")
    begins = torch.rand(shape, generator=torch.Generator().manual_seed(0)) < 1 / DOCUMENT_TOKENS
    return Packing.of(begins.cumsum(1)).to("cuda")


def repeating(run: Run) -> Run:
    def call() -> tuple[Tensor, ...]:
        with deterministic(True):
            return run()

    return call


def by_torch(backend: SDPBackend, size: Size, *given: Tensor) -> Tensor:
    with sdpa_kernel(backend):
        q, k, v = (tensor.unflatten(0, (-1, size.length)).transpose(1, 2) for tensor in given)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=size.heads != size.key_heads)
    return mixed.transpose(1, 2).flatten(0, 1)


def by_borders(packing: Packing, size: Size, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Runs the attention of PyTorch that a layer would use."""
    rows = (tensor.unflatten(0, (-1, size.length)) for tensor in (q, k, v))
    return attention_of_a_layer(*rows, window=size.window, packing=packing).flatten(0, 1)


def by_kernels(lowest_T: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return causal_attention(q, k, v, lowest_T, implementation="triton")


def case(size: Size, backward: bool) -> Case:
    packing = packing_of(size)
    before_T = packing.positions_BS.flatten()
    if size.window is not None:
        before_T = before_T.clamp(max=size.window - 1)
    lowest_T = (torch.arange(size.tokens, device="cuda") - before_T).int()

    def drawn(heads: int) -> Tensor:
        return torch.randn((size.tokens, heads, size.head_size), device="cuda").bfloat16()

    inputs = tuple(drawn(heads).requires_grad_() for heads in (size.heads, size.key_heads, size.key_heads))
    grad = drawn(size.heads)

    def run(attend: Callable[..., Tensor]) -> Run:
        return both(attend, inputs, (grad,)) if backward else forward(attend, inputs)

    if size.documents or size.window is not None:
        peer, others = "varlen", partial(by_borders, packing, size)
    else:
        peer, others = "flash", partial(by_torch, SDPBackend.FLASH_ATTENTION, size)
    arms: dict[str, Callable[[], Run]] = {
        "redline": lambda: run(partial(by_kernels, lowest_T)),
        peer: lambda: run(others),
        f"{peer}, deterministic": lambda: repeating(run(others)),
    }
    if peer == "flash":
        arms["cudnn"] = lambda: run(partial(by_torch, SDPBackend.CUDNN_ATTENTION, size))
    if size.tokens <= PLAIN_TOKENS:
        plain = partial(plain_attention, lowest_T)
        arms["eager"] = lambda: run(plain)
        arms["torch.compile"] = lambda: run(torch.compile(plain, fullgraph=True, dynamic=False))
    seen = int((before_T + 1).sum())
    sizes: dict[str, object] = {name: value for name, value in vars(size).items() if value is not None}
    return Case(
        name=f"causal_attention {'forward+backward' if backward else 'forward'}",
        sizes=sizes | {"dtype": "bf16"},
        arms=arms,
        expected=run(others),
        largest_error=LARGEST_ERROR,
        needed_flop=(3.5 if backward else 1) * 4 * size.heads * size.head_size * seen,
    )


def far_case(length: int, backward: bool, exact: bool = False, tokens: int = TOKENS) -> Case:
    """Compares flex attention with the kernels as a layer of a memory model calls them; `exact` is fp32."""
    config = TitanConfig(vocabulary=2, width=768, layers=1, heads=12, attention_every=1, memory_slots=512)
    positions = TokenPositions.whole(
        torch.zeros(tokens // length, length, dtype=torch.int64, device="cuda"), None, config
    )

    def drawn() -> Tensor:
        shape = (tokens // length, length, config.heads, config.head_dim)
        return torch.randn(shape, device="cuda").to(torch.float32 if exact else torch.bfloat16).requires_grad_()

    bias = F.logsigmoid(torch.randn(tokens // length, length, device="cuda")).requires_grad_()
    inputs, grad = (*(drawn() for _ in range(5)), bias), drawn().detach()

    def attend(implementation: str, q: Tensor, k: Tensor, v: Tensor, *far: Tensor) -> Tensor:
        window = config.segment, config.window_segments
        return windowed_attention(q, k, v, positions, *window, (far[0], far[1], far[2]), implementation)

    def run(implementation: str) -> Run:
        called = partial(attend, implementation)
        return both(called, inputs, (grad,)) if backward else forward(called, inputs)

    by_flex = "reference"  # selects PyTorch's attention on a GPU
    arms: dict[str, Callable[[], Run]] = {
        "redline": lambda: run("triton"),
        "flex attention": lambda: run(by_flex),
        "flex attention, deterministic": lambda: repeating(run(by_flex)),
    }
    sizes: dict[str, object] = {"length": length, "heads": 12, "head_size": 64, "tokens": tokens}
    sizes |= {"segment": config.segment, "window_segments": config.window_segments}
    return Case(
        name=f"causal_attention, near and far, {'forward+backward' if backward else 'forward'}",
        sizes=sizes | {"dtype": "fp32" if exact else "bf16"},
        arms=arms,
        expected=run(by_flex),
        largest_error=LARGEST_ERROR_FP32 if exact else LARGEST_ERROR,
        needed_flop=(3.5 if backward else 1) * 4 * config.width * tokens * (length + 1) / 2,
    )


def plain_attention(lowest_T: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return reference.causal_attention(q, k, v, lowest_T)


def cases() -> Iterable[Case]:
    for backward in (True, False):
        for size in SIZES:
            yield case(size, backward)
        for length in (8192, 32_768):
            yield far_case(length, backward)
        yield far_case(8192, backward, exact=True, tokens=8192)


def sweep() -> Iterable[Case]:
    """Sweeps the tiles of one kernel at a time, with the shipped tiles of the others."""
    from redline.ops.causal_attention import triton

    made: list[Callable[[bool], Case]] = [
        partial(case, size) for size in (SIZES[0], SIZES[1], SIZES[3], SIZES[5], Size(2048, key_heads=4))
    ]
    for case_of in (*made, partial(far_case, 8192)):
        for what in ("forward", "queries", "keys"):
            plain = case_of(what != "forward")
            size = plain.sizes["head_size"]
            build = plain.arms["redline"]
            arms: dict[str, Callable[[], Run]] = {"as shipped": build}
            for queries in (64, 128):
                for keys in (32, 64, 128):
                    for warps in (4, 8):
                        for stages in (2, 3):
                            tiles = triton.Tiles(queries, keys, warps, stages, kib=0)
                            table = {**triton.TILES, (what, 2, size): (tiles,)}
                            values: dict[str, object] = {"TILES": table}
                            arms[str(tiles)] = lambda values=values, build=build: with_values(triton, values, build())
            yield replace(plain, name=f"sweep of {what} of {plain.name}", arms=arms)


if __name__ == "__main__":
    sys.exit(main("causal_attention", cases, sweep))

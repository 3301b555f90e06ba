"""Times the implementations of window attention at the five layers of a DRCT-L group, in bf16.

    python benchmarks/kernels/window_attention.py --out FILE [--only forward] [--sweep]

One image of 256 × 256 tokens. The arithmetic is that of attention, without padding and recomputation.
"""

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

import torch
from arms import Case, Run, both, forward, main, with_values
from torch import Tensor

from redline.ops.window_attention import reference, window_attention

WINDOW, SIDE = 16, 256
# Error of bf16 against fp32 over a whole tensor: eager arms also round their scores, and a wrong mask exceeds this.
LARGEST_ERROR = 0.05
Attend = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Layer:
    channels: int
    heads: int
    shift: int

    def flop(self, backward: bool) -> float:
        """Returns the FLOPs of two matrix products in forward, and five more in backward."""
        return (7 if backward else 2) * 2 * SIDE**2 * WINDOW**2 * self.channels


LAYERS = (Layer(180, 6, 0), Layer(212, 4, 8), Layer(244, 2, 0), Layer(276, 6, 8), Layer(308, 4, 0))
# The same with heads padded to multiples of 8, as in packed groups.
FILLED = (Layer(192, 6, 0), Layer(224, 4, 8), Layer(256, 2, 0), Layer(288, 6, 8), Layer(320, 4, 0))


def case(layer: Layer, backward: bool) -> Case:
    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda").bfloat16()

    qkv, table = drawn(1, SIDE, SIDE, 3 * layer.channels), drawn((2 * WINDOW - 1) ** 2, layer.heads)
    inputs = (qkv.requires_grad_(), table.requires_grad_())
    grad = drawn(1, SIDE, SIDE, layer.channels)

    def run(attend: Attend, given: tuple[Tensor, ...] = inputs) -> Run:
        return both(attend, given, (grad.to(given[0].dtype),)) if backward else forward(attend, given)

    def by(implementation: str) -> Attend:
        return partial(window_attention, window=WINDOW, shift=layer.shift, implementation=implementation)

    def compiled() -> Attend:
        whole = torch.compile(reference.window_attention, fullgraph=True, dynamic=False)
        return partial(whole, window=WINDOW, shift=layer.shift)

    def expected() -> tuple[Tensor, ...]:
        return run(by("reference"), tuple(tensor.detach().float().requires_grad_() for tensor in inputs))()

    return Case(
        name=f"window_attention {'with backward' if backward else 'forward'}",
        sizes={**vars(layer), "side": SIDE, "window": WINDOW, "dtype": "bf16"},
        arms={
            "reference": lambda: run(by("reference")),
            "compiled reference": lambda: run(compiled()),
            "sdpa": lambda: run(by("sdpa")),
            "triton": lambda: run(by("triton")),
        },
        expected=expected,
        largest_error=LARGEST_ERROR,
        needed_flop=layer.flop(backward),
    )


def cases() -> Iterable[Case]:
    for layer in LAYERS:
        for backward in (False, True):
            yield case(layer, backward)
    for layer in FILLED:
        yield case(layer, backward=False)


def sweep() -> Iterable[Case]:
    """Sweeps the tiles of forward, then of backward."""
    from redline.ops.window_attention import triton

    shapes = [(64, 32, 4), (64, 64, 4), (64, 128, 4), (128, 32, 8), (128, 64, 8), (128, 128, 8)]
    for layer in (*FILLED, *LAYERS):
        for name, more, backward in (
            ("FORWARD_TILES", [(256, 32, 8), (256, 64, 8), (64, 256, 8)], False),
            ("BACKWARD_TILES", [(64, 16, 4), (64, 64, 8)], True),
        ):
            plain = case(layer, backward)
            build = plain.arms["triton"]
            arms: dict[str, Callable[[], Run]] = {"as shipped": build}
            for queries, keys, warps in shapes + more:
                for stages, read in ((1, 8), (2, 8), (3, 8), (2, 16)):
                    tiles = triton.Tiles(queries, keys, warps, stages)
                    values: dict[str, object] = {name: dict.fromkeys(triton.FORWARD_TILES, tiles)}
                    values["_BIAS_READ_BYTES"] = read
                    arms[f"{tiles} bias_read_bytes={read}"] = lambda values=values, build=build: with_values(
                        triton, values, build()
                    )
            yield replace(plain, name=f"sweep of {plain.name}", arms=arms)


if __name__ == "__main__":
    sys.exit(main("window_attention", cases, sweep))

"""Times window attention in its implementations, at the five layers of a DRCT-L group, on a CUDA device.

    python benchmarks/window_attention.py --out FILE               every implementation, forward and with backward
    python benchmarks/window_attention.py --out FILE --sweep forward --channels 180    tiles of the Triton kernels

One picture of 256 × 256 tokens, bf16. Each arm is captured as a CUDA graph, as the upscaler runs it, and the arms take
turns; before each turn the second-level cache is emptied. An arm whose output or gradients are off gets no time, and
one that fails is a row that says so. Rows are JSON lines; the counted arithmetic is what attention needs, without
what a kernel adds by padding or by computing anew.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from redline.files import write_text
from redline.ops.window_attention import reference, sdpa

WINDOW = 16
# Of a bf16 arm against fp32, over a whole tensor: eager ones round their scores too, and a wrong mask is off by more.
LARGEST_ERROR = 0.05
Attend = Callable[[Tensor, Tensor, int, int], Tensor]
Run = Callable[[], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Layer:
    channels: int
    heads: int
    shift: int

    def tflop(self, tokens: int, backward: bool) -> float:
        """Two products forward, and five more backward."""
        return (7 if backward else 2) * 2 * tokens * WINDOW**2 * self.channels / 1e12


LAYERS = (Layer(180, 6, 0), Layer(212, 4, 8), Layer(244, 2, 0), Layer(276, 6, 8), Layer(308, 4, 0))


def implementations() -> dict[str, Attend]:
    from redline.ops.window_attention import triton

    return {
        "reference": reference.window_attention,
        "sdpa": sdpa.window_attention,
        "compiled reference": torch.compile(reference.window_attention, fullgraph=True, dynamic=False),
        "triton": triton.window_attention,
    }


def arm(attend: Attend, inputs: tuple[Tensor, Tensor, Tensor], layer: Layer, backward: bool) -> Run:
    qkv, table, gradient = inputs

    def forward() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return (attend(qkv, table, WINDOW, layer.shift),)

    def both() -> tuple[Tensor, ...]:
        out = attend(qkv, table, WINDOW, layer.shift)
        return (out.detach(), *torch.autograd.grad(out, (qkv, table), gradient))

    return both if backward else forward


def inputs_of(layer: Layer, batch: int, side: int) -> tuple[Tensor, Tensor, Tensor]:
    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda").bfloat16()

    qkv, table = drawn(batch, side, side, 3 * layer.channels), drawn((2 * WINDOW - 1) ** 2, layer.heads)
    return qkv.requires_grad_(), table.requires_grad_(), drawn(batch, side, side, layer.channels)


def exact(inputs: tuple[Tensor, Tensor, Tensor], layer: Layer, backward: bool) -> tuple[Tensor, ...]:
    wide = tuple(tensor.detach().float().requires_grad_() for tensor in inputs)
    return arm(reference.window_attention, wide, layer, backward)()  # pyright: ignore[reportArgumentType]


def worst_error(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float:
    errors = [((one.float() - other).norm() / other.norm()).item() for one, other in zip(found, expected, strict=True)]
    return max(errors) if all(error == error for error in errors) else float("nan")


def captured(run: Run) -> Callable[[], None]:
    """The run as a graph; its results are thrown away."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def race(runs: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each turn; all take part in every round."""
    cache = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in runs}
    for warm in (True, False):
        for _ in range(3 if warm else rounds):
            for name, run in runs.items():
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                cache.zero_()
                begin.record()
                run()
                end.record()
                if not warm:
                    events[name].append((begin, end))
        torch.cuda.synchronize()
    return {name: [begin.elapsed_time(end) for begin, end in pairs] for name, pairs in events.items()}


def measure(
    arms: dict[str, Callable[[], Run]], layer: Layer, inputs: tuple[Tensor, Tensor, Tensor], backward: bool, rounds: int
) -> list[dict[str, object]]:
    """A row for each arm; what cannot be built, captured or trusted says why instead of a time."""
    expected = exact(inputs, layer, backward)
    rows: dict[str, dict[str, object]] = {}
    runs: dict[str, Callable[[], None]] = {}
    for name, build in arms.items():
        rows[name] = {"arm": name, "backward": backward, **asdict(layer)}
        try:
            run = build()
            run()
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            found = run()
            rows[name]["peak_bytes"] = torch.cuda.max_memory_allocated() - before
            error = rows[name]["relative_error"] = worst_error(found, expected)
            del found
            if not error <= LARGEST_ERROR:
                raise ArithmeticError(f"off by {error:.3g}")
            runs[name] = captured(run)
        except Exception as failure:  # noqa: BLE001
            rows[name]["failure"] = f"{type(failure).__name__}: {failure}"[:500]
            torch.cuda.synchronize()
    del expected
    tokens = inputs[0].shape[:3].numel()
    for name, samples in race(runs, rounds).items():
        deciles = statistics.quantiles(samples, n=10)
        rows[name] |= {"median_ms": statistics.median(samples), "p20_ms": deciles[1], "p80_ms": deciles[7]}
        rows[name]["tflop_per_s"] = layer.tflop(tokens, backward) / statistics.median(samples) * 1e3
        rows[name]["samples"] = len(samples)
    return list(rows.values())


@contextmanager
def tiled(queries: int, keys: int, warps: int, stages: int, bias_read_bytes: int) -> Iterator[None]:
    """The Triton kernels with these tiles for every size."""
    from redline.ops.window_attention import triton

    kept = triton.FORWARD_TILES, triton.BACKWARD_TILES, triton._BIAS_READ_BYTES
    chosen = dict.fromkeys(triton.FORWARD_TILES, triton.Tiles(queries, keys, warps, stages))
    triton.FORWARD_TILES = triton.BACKWARD_TILES = chosen
    triton._BIAS_READ_BYTES = bias_read_bytes
    try:
        yield
    finally:
        triton.FORWARD_TILES, triton.BACKWARD_TILES, triton._BIAS_READ_BYTES = kept


def sweep_arms(inputs: tuple[Tensor, Tensor, Tensor], layer: Layer, backward: bool) -> dict[str, Callable[[], Run]]:
    from redline.ops.window_attention import triton

    arms: dict[str, Callable[[], Run]] = {"as shipped": lambda: arm(triton.window_attention, inputs, layer, backward)}
    shapes = [(64, 32, 4), (64, 64, 4), (64, 128, 4), (128, 32, 8), (128, 64, 8), (128, 128, 8)]
    shapes += [(64, 16, 4), (64, 64, 8)] if backward else [(256, 32, 8), (256, 64, 8), (64, 256, 8)]
    for queries, keys, warps in shapes:
        for stages, read in ((1, 8), (2, 8), (3, 8), (2, 16)):

            def build(tiles: tuple[int, int, int, int, int] = (queries, keys, warps, stages, read)) -> Run:
                plain = arm(triton.window_attention, inputs, layer, backward)

                def run() -> tuple[Tensor, ...]:
                    with tiled(*tiles):
                        return plain()

                return run

            arms[f"queries={queries} keys={keys} warps={warps} stages={stages} bias_read_bytes={read}"] = build
    return arms


def main() -> int:
    parser = argparse.ArgumentParser(description="Times window attention at the layers of DRCT-L.")
    parser.add_argument("--out", type=Path, required=True, help="file for the rows, as JSON lines")
    parser.add_argument("--side", type=int, default=256, help="tokens a side")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--channels", type=int, nargs="*", choices=[layer.channels for layer in LAYERS], help="layers")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--sweep", choices=["forward", "backward"], help="tiles of the Triton kernels, for one pass")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("window_attention.py needs a CUDA device.", file=sys.stderr)
        return 2
    import triton as compiler

    about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": compiler.__version__}
    about |= {"dtype": "bf16", "batch": arguments.batch, "side": arguments.side, "window": WINDOW}
    rows: list[dict[str, object]] = []
    passes = (False, True) if arguments.sweep is None else (arguments.sweep == "backward",)
    for layer in LAYERS:
        if arguments.channels and layer.channels not in arguments.channels:
            continue
        for backward in passes:
            torch.compiler.reset()  # else its limit of compilations of one function is soon met
            inputs = inputs_of(layer, arguments.batch, arguments.side)
            if arguments.sweep:
                arms = sweep_arms(inputs, layer, backward)
            else:
                arms = {
                    name: lambda attend=attend, inputs=inputs, layer=layer, backward=backward: arm(
                        attend, inputs, layer, backward
                    )
                    for name, attend in implementations().items()
                }
            measured = measure(arms, layer, inputs, backward, arguments.rounds)
            rows += [about | row for row in measured]
            write_text(arguments.out, "".join(json.dumps(row) + "\n" for row in rows))
            show(measured, layer, backward)
    return 0


def show(rows: list[dict[str, object]], layer: Layer, backward: bool) -> None:
    direction = "forward and backward" if backward else "forward"
    print(f"\n{layer.channels} channels, {layer.heads} heads, shift {layer.shift}, {direction}")
    for row in sorted(rows, key=lambda row: float(str(row.get("median_ms", "inf")))):
        if "failure" in row:
            print(f"  {row['arm']}: {row['failure']}")
        else:
            spread = f"{row['median_ms']:.4f} ms ({row['p20_ms']:.4f} to {row['p80_ms']:.4f})"
            print(f"  {row['arm']}: {spread}, {row['tflop_per_s']:.1f} TFLOP/s, error {row['relative_error']:.1e}")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())

"""Measures claims of the guides that need a GPU, in about five minutes.

    python benchmarks/claims_gpu.py --out FILE [--only CASE] [--tiny]

claims.py turns the rows into docs/claims.md. Times are of whole calls, interleaved; `--tiny` runs small sizes on the
CPU. Some cases are those of claims_cpu.py on the GPU. The last one is a climb, and writes its measurements beside FILE.
"""

import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from claim_cases import Bench, Row, main
from claims_cpu import fused_attention, inference_mode, squared_error, stored_scores, tile_rows
from claims_gpu_training import fp16_training, rate_rule
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from redline import climb
from redline.models.decoder import Decoder, DecoderConfig
from redline.models.drct.config import DrctConfig
from redline.nn.checkpointing import checkpointed
from redline.nn.swiglu import SwiGLU
from redline.ops.causal_attention import causal_attention
from redline.ops.layer_norm_dropout_relu import layer_norm_dropout_relu
from redline.upscale.upscaler import Upscaler

TINY_CLIMB = str(Path(__file__).resolve().parents[1] / "tests/tiny_workloads.py:convolutions")
HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def alignment(bench: Bench) -> list[Row]:
    """Times linear layers and convolutions with channels that are multiples of 8, of 4, of 2 and of nothing."""
    rows = []
    tokens, image = bench.pick(8192, 32), bench.pick((64, 64), (1, 8))
    for dtype, half in HALVES.items():
        put = {"device": bench.device, "dtype": half}
        layers: dict[str, tuple[int, Callable[[int], tuple[nn.Module, Tensor]]]] = {
            "linear": (
                bench.pick(4096, 64),
                lambda n, put=put: (nn.Linear(n, n, **put), torch.randn(tokens, n, **put)),
            ),
            "conv2d": (
                bench.pick(192, 32),
                lambda n, put=put: (
                    _channels_last(nn.Conv2d(n, n, 3, padding=1, **put)),
                    torch.randn(image[0], n, image[1], image[1], **put).to(memory_format=torch.channels_last),
                ),
            ),
        }
        for kind, (aligned, make) in layers.items():
            arms: dict[str, Callable[[], object]] = {}
            for missing in (0, 4, 6, 7):
                layer, x = make(aligned - missing)
                arms[f"{kind}, {aligned - missing} channels"] = partial(_without_gradients, layer, x)
            rows += bench.timed("alignment", arms, dtype=dtype)
    return rows


def _channels_last(layer: nn.Conv2d) -> nn.Conv2d:
    return layer.to(memory_format=torch.channels_last)  # pyrefly: ignore[no-matching-overload]


def _without_gradients(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    with torch.no_grad():
        return function(*inputs)


def head_sizes(bench: Bench) -> list[Row]:
    """Times attention of the same width in heads of several sizes, with the backend that PyTorch selects."""
    batch, length, width = bench.pick((4, 4096, 1024), (1, 64, 64))

    def drawn(size: int) -> list[Tensor]:
        shape = (batch, width // size, length, size)
        return [torch.randn(shape, device=bench.device, dtype=torch.float16) for _ in range(3)]

    def by(backend: SDPBackend, *given: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return fused_attention(*given)

    sizes = bench.pick((32, 64, 128, 256), (16, 32))
    arms = {f"head of {size}": partial(_without_gradients, fused_attention, *drawn(size)) for size in sizes}
    rows = bench.timed("head sizes", arms, dtype="fp16", length=length, width=width)
    for row, run in zip(rows, arms.values(), strict=True):
        row["kernel"] = longest_kernel(bench, run)
    if bench.on_gpu:
        given = drawn(64)
        backends = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
        arms = {name: partial(_without_gradients, partial(by, backend), *given) for name, backend in backends.items()}
        arms["stored scores"] = partial(_without_gradients, stored_scores, *given)
        rows += bench.timed("head sizes", arms, dtype="fp16", length=length, width=width)
    return rows


def _device_events(bench: Bench, run: Callable[[], object]) -> list[Any]:
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA] if bench.on_gpu else None) as profiled:
        run()
        bench.wait()
    found = profiled.profiler
    assert found is not None and found.kineto_results is not None
    wanted = DeviceType.CUDA if bench.on_gpu else DeviceType.CPU
    return [event for event in found.kineto_results.events() if event.device_type() == wanted and event.duration_ns()]


def longest_kernel(bench: Bench, run: Callable[[], object]) -> str:
    """Returns the name of the kernel that runs longest, or "" if the profiler sees none."""
    events = _device_events(bench, run)
    return max(events, key=lambda event: event.duration_ns()).name()[:120] if events else ""


def mlp(bench: Bench) -> list[Row]:
    """Times forward and backward of an MLP as it is and with torch.compile."""
    width, tokens = bench.pick((2048, 8192), (32, 16))
    dtype = bench.pick(torch.bfloat16, torch.float32)
    layer = SwiGLU(width, 4 * width).to(bench.device, dtype)
    x = torch.randn(tokens, width, device=bench.device, dtype=dtype, requires_grad=True)
    grad = torch.randn_like(x)

    def trained(forward: Callable[[Tensor], Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(forward(x), (x, *layer.parameters()), grad)

    compiled = torch.compile(layer, backend=bench.pick("inductor", "eager"), dynamic=False)
    arms = {"eager": trained(layer), "compile": trained(compiled)}
    return bench.timed("mlp", arms, width=width, tokens=tokens, dtype=bench.pick("bf16", "fp32"))


def optimizer(bench: Bench) -> list[Row]:
    """Times a step of AdamW on the weights of a 124M decoder: a loop, PyTorch's default, and fused."""
    shape = bench.pick((50_304, 768, 12), (64, 64, 1))
    arms: dict[str, Callable[[], object]] = {}
    count = 0
    options: dict[str, dict[str, bool]] = {"loop": {"foreach": False}, "default": {}, "fused": {"fused": True}}
    for name, given in options.items():
        torch.manual_seed(0)
        with torch.device(bench.device):
            model = Decoder(DecoderConfig(*shape, heads=12 if shape[1] == 768 else 1, mlp_width=4 * shape[1]))
        made = torch.optim.AdamW(model.parameters(), foreach=given.get("foreach"), fused=given.get("fused"))
        for weight in model.parameters():
            weight.grad = torch.randn_like(weight)
        arms[name] = made.step
        count = sum(weight.numel() for weight in model.parameters())
    return bench.timed("optimizer", arms, parameters=count, dtype="fp32")


def checkpointing(bench: Bench) -> list[Row]:
    """Measures the peak of training a decoder on one text, with and without activation checkpointing of its blocks."""
    length, width, layers = bench.pick((16_384, 1024, 12), (64, 64, 2))
    rows = []
    for arm in ("plain", "checkpointed"):
        config = DecoderConfig(256, width, layers, width // 64, mlp_width=3 * width, context=length)
        model = Decoder(config).to(bench.device, bench.pick(torch.bfloat16, torch.float32))
        if arm == "checkpointed":
            for block in model.blocks:
                block.forward = partial(checkpointed, block.forward)
        tokens = torch.randint(256, (1, length), device=bench.device)

        def step(model: Decoder = model, tokens: Tensor = tokens) -> None:
            model.loss(tokens, tokens).backward()
            model.zero_grad()

        rows.append(
            {
                "case": "checkpointing",
                "arm": arm,
                "length": length,
                "width": width,
                "layers": layers,
                "peak_bytes": bench.peak_bytes(step),
            }
        )
    return rows


def blocks(bench: Bench) -> list[Row]:
    """Times backward of LayerNorm + dropout + ReLU by threads per block and blocks per multiprocessor."""
    count, width = bench.pick((16_384, 4096), (8, 64))
    put = {"device": bench.device, "dtype": bench.pick(torch.bfloat16, torch.float32)}
    x, weight, bias = (torch.randn(shape, **put).requires_grad_() for shape in ((count, width), (width,), (width,)))
    grad = torch.randn_like(x)
    implementation = bench.pick("triton", "reference")

    def run() -> object:
        out = layer_norm_dropout_relu(x, weight, bias, p=0.1, eps=1e-5, implementation=implementation)
        return torch.autograd.grad(out, (x, weight, bias), grad)

    if not bench.on_gpu:
        return bench.timed("blocks", {"as shipped": run}, width=width)
    from redline.ops.layer_norm_dropout_relu import triton

    arms: dict[str, Callable[[], object]] = {"as shipped": run}
    for threads in (256, 512):
        for programs in (1, 2, 4):
            table = {65_536: triton.Tiles(1, threads // 32, programs, 1)}
            arms[f"{threads} threads, {programs} blocks"] = partial(_with_value, triton, "BACKWARD_TILES", table, run)
    return bench.timed("blocks", arms, rows=count, width=width, dtype="bf16")


def attention_blocks(bench: Bench) -> list[Row]:
    """Times causal attention over 2,048 tokens by the number of queries and keys of a block."""
    length, heads, batch = bench.pick((2048, 12, 32), (32, 2, 1))
    tokens = batch * length
    put = {"device": bench.device, "dtype": bench.pick(torch.bfloat16, torch.float32)}
    given = [torch.randn(tokens, heads, 64, **put) for _ in range(3)]
    lowest = torch.arange(batch, device=bench.device, dtype=torch.int32).repeat_interleave(length) * length
    implementation = bench.pick("triton", "reference")
    run = partial(_without_gradients, partial(causal_attention, implementation=implementation), *given, lowest)
    if not bench.on_gpu:
        return bench.timed("attention blocks", {"as shipped": run}, length=length)
    from redline.ops.causal_attention import triton

    arms: dict[str, Callable[[], object]] = {"as shipped": run}
    for side, warps, stages in ((32, 4, 3), (64, 4, 3), (128, 8, 2)):
        table = {**triton.TILES, ("forward", 2, 64): (triton.Tiles(side, side, warps, stages, 0),)}
        arms[f"blocks of {side}"] = partial(_with_value, triton, "TILES", table, run)
    return bench.timed("attention blocks", arms, length=length, heads=heads, head_size=64, dtype="bf16")


def _with_value(module: object, name: str, value: object, run: Callable[[], object]) -> object:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        return run()
    finally:
        setattr(module, name, before)


def utilization(bench: Bench) -> list[Row]:
    """Measures the share of an upscaling during which the GPU runs a kernel or a copy."""
    side = bench.pick(1024, 32)
    upscaler = Upscaler("drct-small-x4", device=str(bench.device))
    image = torch.rand(3, side, side, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        upscaler(image)
    wall_ns = 1e9 * min(bench.seconds(lambda: upscaler(image)) for _ in range(3))
    busy = last = 0
    for event in sorted(_device_events(bench, lambda: upscaler(image)), key=lambda event: event.start_ns()):
        end = event.start_ns() + event.duration_ns()
        busy += max(0, end - max(last, event.start_ns()))
        last = max(last, end)
    return [{"case": "utilization", "arm": "drct-small-x4", "side": side, "busy_share": min(1.0, busy / wall_ns)}]


def tiles(bench: Bench) -> list[Row]:
    """Measures the peak of DRCT-L by tile and by scale."""
    config = DrctConfig.of(4, groups=bench.pick(12, 1))
    side = bench.pick(256, 32)
    return tile_rows(bench, config, bench.pick((128, 256, 512), (16, 32)), (2, 4, 8), side, "DRCT-L, fp32")


def memory_climb(bench: Bench) -> list[Row]:
    """Climbs the 880M U-Net for the smallest peak, and writes the measurements to `unet_880m-memory.jsonl`."""
    workload, budget = bench.pick(("unet_880m", "150s"), (TINY_CLIMB, "8s"))
    with tempfile.TemporaryDirectory() as folder:
        climbed = climb(
            workload, objective="memory", budget=budget, device=str(bench.device), out=folder, progress=None
        )
        if bench.folder is not None:
            shutil.copyfile(climbed.files["measurements"], bench.folder / "unet_880m-memory.jsonl")
    final = climbed.final
    return [{"case": "memory climb", "arm": workload, "plan": str(climbed.plan), "peak_bytes": final.peak_bytes}]


CASES = {
    "alignment": alignment,
    "head_sizes": head_sizes,
    "blocks": blocks,
    "attention_blocks": attention_blocks,
    "optimizer": optimizer,
    "checkpointing": checkpointing,
    "fp16_training": fp16_training,
    "rate_rule": rate_rule,
    "inference_mode": inference_mode,
    "squared_error": squared_error,
    "utilization": utilization,
    "tiles": tiles,
    "mlp": mlp,
    "memory_climb": memory_climb,
}

if __name__ == "__main__":
    sys.exit(main("Measures claims of the guides that need a GPU.", CASES, "cuda", None))

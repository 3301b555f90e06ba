"""Measures claims of the guides that need no GPU: how costs grow, and what precision does to values.

    python benchmarks/claims_cpu.py --out FILE [--only CASE] [--tiny]

claims.py turns the rows into docs/claims.md. Memory is what torch's allocator reports; FLOP are counted.
"""

import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace

import torch
from claim_cases import Bench, Row, grown, main
from claim_text import VOCABULARY, decoder, draw, held_out_loss, read_text
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from redline.ladder.plan import Plan, Unavailable
from redline.ladder.rewrites.quantize import stored_bytes
from redline.machine.meta import meta_device
from redline.models.decoder import Decoder, DecoderConfig
from redline.models.drct.checkpoint import load_drct
from redline.models.drct.config import DrctConfig
from redline.models.drct.model import Drct
from redline.models.lsd.checkpoint import load_lsd
from redline.models.memory.slot_bank import SlotBank
from redline.models.samplers import STEPS
from redline.stream.loading import SHIPPED
from redline.upscale.network import shipped_weights

HEAD_DIM = 64
HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def stored_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).softmax(-1) @ v


def fused_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def flop(run: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def complexity(bench: Bench) -> list[Row]:
    """Measures the memory of attention, the slot bank, activations and parameters, by each size in its formula."""
    return [*_attention(bench), *_slots(bench), *_activations(bench), *_parameters(bench)]


def _attention(bench: Bench) -> list[Row]:
    lengths = bench.pick((512, 1024, 2048, 4096), (64, 128))
    arms = {"attention, stored scores": stored_scores, "attention, fused": fused_attention}

    def inputs(batch: int, length: int) -> list[Tensor]:
        return [torch.randn(batch, 2, length, HEAD_DIM, device=bench.device) for _ in range(3)]

    rows = []
    with torch.no_grad():
        for arm, attend in arms.items():
            by_length, by_batch, flops = [], [], []
            for length in lengths:
                given = inputs(1, length)
                by_length.append((length, bench.peak_bytes(lambda given=given, attend=attend: attend(*given))))
                flops.append((length, flop(lambda given=given, attend=attend: attend(*given))))
            for batch in (1, 2, 4, 8):
                given = inputs(batch, lengths[0])
                by_batch.append((batch, bench.peak_bytes(lambda given=given, attend=attend: attend(*given))))
            rows.append(grown("complexity", arm, "length", by_length, of="bytes"))
            rows.append(grown("complexity", arm, "batch", by_batch, of="bytes"))
            # The counter does not know PyTorch's fused kernel for CPUs.
            if attend is stored_scores:
                rows.append(grown("complexity", arm, "length", flops, of="flop"))
    return rows


def _slots(bench: Bench) -> list[Row]:
    def bank_bytes(slots: int, width: int) -> int:
        bank = SlotBank.empty(1, slots, width // HEAD_DIM, HEAD_DIM, torch.device("cpu"), torch.float32)
        return sum(value.nbytes for value in vars(bank).values())

    by_slots = [(slots, bank_bytes(slots, 512)) for slots in (128, 256, 512, 1024, 2048)]
    by_width = [(width, bank_bytes(512, width)) for width in (128, 256, 512, 1024, 2048)]
    return [
        grown("complexity", "memory bank", "slots", by_slots, of="bytes"),
        grown("complexity", "memory bank", "width", by_width, of="bytes"),
    ]


def _activations(bench: Bench) -> list[Row]:
    """Measures what the forward pass keeps for backward, in a decoder of two layers."""
    longest = bench.pick(1024, 64)

    def kept_bytes(batch: int, length: int, width: int) -> int:
        model = decoder(width, 2, longest)
        tokens, _ = draw(torch.arange(VOCABULARY).repeat(8), batch, length, torch.Generator().manual_seed(0))
        kept: dict[int, int] = {}
        weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            hidden = model.hidden(tokens)
        total = sum(kept.values())
        del hidden
        return total

    half, width = longest // 2, bench.pick(256, 64)
    sizes = {
        "length": [(length, (1, length, width)) for length in (longest // 8, longest // 4, half, longest)],
        "batch": [(batch, (batch, longest // 8, width)) for batch in (1, 2, 4, 8)],
        "width": [(wide, (1, longest // 8, wide)) for wide in (width, 2 * width, 4 * width)],
    }
    return [
        grown("complexity", "activations", by, [(size, kept_bytes(*given)) for size, given in points], of="bytes")
        for by, points in sizes.items()
    ]


def _parameters(bench: Bench) -> list[Row]:
    def count(width: int, layers: int) -> int:
        with meta_device():
            model = Decoder(DecoderConfig(VOCABULARY, width, layers, width // HEAD_DIM, mlp_width=3 * width))
        return sum(weight.numel() for weight in model.blocks.parameters())

    return [
        grown("complexity", "parameters", "layers", [(n, count(512, n)) for n in (2, 4, 8, 16)], of="parameters"),
        grown("complexity", "parameters", "width", [(n, count(n, 4)) for n in (256, 512, 1024, 2048)], of="parameters"),
    ]


def inference_mode(bench: Bench) -> list[Row]:
    """Times a forward pass of the shipped live model (many small operations) in both modes, and with gradients."""
    model = load_lsd(SHIPPED).to(bench.device)
    frame = torch.rand(1, 3, 64, 64, device=bench.device) * 2 - 1
    step = torch.full((1,), STEPS - 1, device=bench.device)

    def plain() -> None:
        model(frame, frame, frame, step)

    def within(mode: Callable[[], torch.no_grad | torch.inference_mode]) -> Callable[[], None]:
        def run() -> None:
            with mode():
                plain()

        return run

    arms = {"no_grad": within(torch.no_grad), "inference_mode": within(torch.inference_mode), "gradients": plain}
    return replace(bench, turns=60).timed("inference_mode", arms, model="lsd-tiny", side=64)


def squared_error(bench: Bench) -> list[Row]:
    """Compares both losses in fp16 with fp64, on differences of a normal distribution and several spreads."""

    def stable_mse_loss(pred: Tensor, target: Tensor) -> Tensor:
        diff = pred - target
        return torch.mean(diff * diff)

    losses: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"F.mse_loss": F.mse_loss}
    losses["stable_mse_loss"] = stable_mse_loss
    draws, count = bench.pick(50, 3), bench.pick(2**16, 2**10)
    rows = []
    for spread in (0.01, 1.0, 100.0):
        errors: dict[str, list[float]] = {name: [] for name in losses}
        different = 0
        for seed in range(draws):
            random = torch.Generator().manual_seed(seed)
            pair = [(torch.randn(count, generator=random) * spread).half().to(bench.device) for _ in range(2)]
            exact = F.mse_loss(pair[0].double(), pair[1].double()).item()
            found = {name: loss(pair[0], pair[1]).item() for name, loss in losses.items()}
            different += len(set(found.values())) > 1
            for name, value in found.items():
                errors[name].append(abs(value - exact) / exact)
        for name, values in errors.items():
            finite = [value for value in values if math.isfinite(value)]
            row: Row = {"case": "squared error", "arm": name, "spread": spread, "draws": draws, "dtype": "fp16"}
            row |= {"overflow_share": 1 - len(finite) / draws, "different_share": different / draws}
            if finite:
                row["median_error"] = statistics.median(finite)
            rows.append(row)
    return rows


def int8_accuracy(bench: Bench) -> list[Row]:
    """Trains a byte-level decoder for about 45 s, and compares its held-out loss in lower precisions."""
    train, held_out = read_text()
    length, rows_of_a_batch, limit_s = 128, 16, bench.pick(45.0, 1.0)
    model = decoder(bench.pick(192, 64), bench.pick(3, 1), length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    random = torch.Generator().manual_seed(0)
    begun, steps = time.perf_counter(), 0
    while time.perf_counter() - begun < limit_s:
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (steps + 1) / 20) * (1 - (time.perf_counter() - begun) / limit_s)
        loss = model.loss(*draw(train, rows_of_a_batch, length, random))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        steps += 1
    sample = (draw(train, 4, length, random)[0],)
    rows = []
    for plan in ("fp32", "bf16", "int8", "int8(mode=dynamic)"):
        row: Row = {"case": "int8 accuracy", "arm": plan, "steps": steps, "length": length}
        rows.append(row)
        try:
            made = _in_precision(model, plan, sample)
        except Unavailable as missing:
            row["failure"] = str(missing)
            continue
        row["held_out_loss"] = held_out_loss(made, held_out, length, bench.pick(64, 4))
        row["linear_bytes"] = sum(stored_bytes(m.weight) for m in made.modules() if isinstance(m, nn.Linear))
    return rows


def _in_precision(model: nn.Module, plan: str, sample: tuple[Tensor]) -> nn.Module:
    """Returns a copy of the model in this precision. bf16 is set by hand, because some CPUs only emulate it."""
    if not plan.startswith("int8"):
        return deepcopy(model).to(torch.bfloat16 if plan == "bf16" else torch.float32).eval()
    applied = Plan.parse(plan).apply(model.eval(), sample, check=False)
    assert isinstance(applied, nn.Module)
    return applied


def tiles(bench: Bench) -> list[Row]:
    """Measures the peak of the shipped ×4 model by tile, and of the same widths with random weights by scale."""
    model = load_drct(shipped_weights(4))
    sides = bench.pick((48, 64, 96, 128), (16, 32))
    return tile_rows(bench, model.config, sides, (2, 4, 8), sides[1], "the shipped small model, fp32")


def tile_rows(
    bench: Bench, config: DrctConfig, sides: Sequence[int], scales: Sequence[int], side: int, arm: str
) -> list[Row]:
    def peak(scale: int, side: int) -> int:
        torch.manual_seed(0)
        model = Drct(replace(config, scale=scale)).to(bench.device).eval()
        image = torch.rand(1, 3, side, side, device=bench.device)
        with torch.inference_mode():
            return bench.peak_bytes(lambda: model(image))

    return [
        grown("tiles", arm, "tile", [(side, peak(config.scale, side)) for side in sides], scale=config.scale),
        grown("tiles", arm, "scale", [(scale, peak(scale, side)) for scale in scales], tile=side),
    ]


def noise(bench: Bench) -> list[Row]:
    """Draws the noise of 1,000 frames, and records the largest activation of the shipped live model in fp32."""
    frames, outside, largest = bench.pick(1000, 20), 0, 0.0
    random = torch.Generator().manual_seed(0)
    for _ in range(frames):
        drawn = torch.randn(3, 64, 64, generator=random).abs()
        outside += int((drawn > 4).sum())
        largest = max(largest, drawn.max().item())
    values = frames * 3 * 64 * 64
    rows: list[Row] = [{"case": "noise", "arm": "normal", "outside_4": outside / values, "largest_value": largest}]
    model, seen = load_lsd(SHIPPED), [0.0]
    for module in model.modules():
        if not list(module.children()):
            module.register_forward_hook(lambda m, i, out: seen.append(out.abs().max().item()))
    for frame, noisy in zip(_frames(bench.pick(20, 2)), _frames(bench.pick(20, 2), noise=True), strict=True):
        with torch.inference_mode():
            model(noisy, frame, frame, torch.full((1,), STEPS - 1))
    rows.append({"case": "noise", "arm": "activations", "model": "lsd-tiny", "largest_value": max(seen)})
    for name, dtype in {**HALVES, "fp32": torch.float32}.items():
        rows.append({"case": "noise", "arm": f"range of {name}", "largest_value": torch.finfo(dtype).max})
    return rows


def _frames(count: int, noise: bool = False) -> list[Tensor]:
    """Returns frames of a moving pattern in [-1, 1] with camera noise, or of noise alone."""
    random = torch.Generator().manual_seed(0)
    x = torch.linspace(0, 6, 64)
    frames = []
    for index in range(count):
        waves = torch.sin(x[None, :] * (1 + torch.arange(3.0)[:, None, None]) + 0.3 * index) * torch.cos(x[:, None])
        frames.append(0.8 * waves[None] + 0.05 * torch.randn(1, 3, 64, 64, generator=random))
    return [torch.randn(1, 3, 64, 64, generator=random) for _ in frames] if noise else frames


def quality(bench: Bench) -> list[Row]:
    """Runs the shipped live model over frames, each fed its own previous output, and compares 8-bit images with fp32.

    Rounding to 8 bits is the error that every shown image has anyway.
    """
    frames = _frames(bench.pick(120, 3))
    noisy = _frames(1, noise=True)[0]

    def outputs(dtype: torch.dtype) -> list[Tensor]:
        model, previous, found = load_lsd(SHIPPED).to(dtype), frames[0].to(dtype), []
        for frame in frames:
            with torch.inference_mode():
                previous = model(noisy.to(dtype), frame.to(dtype), previous, torch.full((1,), STEPS - 1))
            found.append(previous.float())
        return found

    exact = outputs(torch.float32)
    rows: list[Row] = []
    for name, dtype in HALVES.items():
        found = outputs(dtype)
        psnr = [10 * math.log10(4 / F.mse_loss(a, b).item()) for a, b in zip(found, exact, strict=True)]
        steps = [(_bytes(a) - _bytes(b)).abs() for a, b in zip(found, exact, strict=True)]
        row: Row = {"case": "quality", "arm": name, "model": "lsd-tiny", "frames": len(frames)}
        row |= {"least_psnr_db": min(psnr), "largest_step": int(torch.stack(steps).max())}
        row["different_share"] = (torch.stack(steps) > 0).float().mean().item()
        rows.append(row)
    error = [F.mse_loss(_bytes(a) / 127.5 - 1, a.clamp(-1, 1)).item() for a in exact]
    rows.append({"case": "quality", "arm": "8 bits", "least_psnr_db": 10 * math.log10(4 / max(error))})
    return rows


def _bytes(image: Tensor) -> Tensor:
    return ((image.clamp(-1, 1) + 1) * 127.5).round()


CASES = {
    "complexity": complexity,
    "inference_mode": inference_mode,
    "squared_error": squared_error,
    "int8_accuracy": int8_accuracy,
    "tiles": tiles,
    "noise": noise,
    "quality": quality,
}

if __name__ == "__main__":
    sys.exit(main("Measures claims of the guides that need no GPU.", CASES, "cpu", None))

"""What `upscale.py` measures with: timing by turns, peak memory, photos and rows of results."""

import math
import shlex
import statistics
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from redline.ladder.gate import Gate, Score, worst
from redline.ladder.measurement import Measurement, append
from redline.ladder.plan import Plan
from redline.machine.machine import Machine
from redline.upscale.export import tiles_of
from redline.upscale.network import load_network
from redline.version import VERSION

GATE = Gate("image_psnr", 40.0)
# 3:2, 2:3 and 4:3, as in an ordinary folder of photos.
SYNTHETIC_SIZES = ((1224, 816), (816, 1224), (1152, 864))
MEGA = 1e6
_LEAST_ROUNDS = 3


def say(text: str) -> None:
    """Prints progress to stderr; results go to stdout."""
    print(f"{text} ...", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Bench:
    """Writes rows of results, and holds what all of them share."""

    out: Path
    machine: Machine
    weights: Path
    photos: Path | None
    rounds: int
    run: str = field(default_factory=lambda: uuid.uuid4().hex[:12])

    @property
    def device(self) -> torch.device:
        return torch.device(self.machine.device)

    def write(self, workload: str, plan: str, seconds: Sequence[float] = (), **others: Any) -> None:
        verdict = others.pop("verdict", "kept" if seconds else "unmeasured")
        row = Measurement(
            workload,
            plan,
            "bench",
            verdict,
            others.pop("reason", ""),
            self.machine.as_dict(),
            samples={"": tuple(seconds)} if seconds else {},
            against_samples={"": tuple(old)} if (old := others.pop("old_seconds", ())) else {},
            items={"": others.pop("each", 1.0)},
            run=self.run,
            command=shlex.join(["python", *sys.argv]),
            redline=VERSION,
            **others,
        )
        append(self.out, row)
        figure = f"{statistics.median(seconds) * 1e3:.4g} ms" if seconds else row.reason
        extra = " ".join(f"{key}={value}" for key, value in row.options.items())
        print(f"{workload} | {plan} | {figure} | {row.peak_bytes / 2**30:.2f} GiB {extra}", flush=True)

    def module(self) -> nn.Module:
        return load_network(self.weights).module.to(self.device)

    def tiles(self, tile: int, count: int, height: int | None = None) -> Tensor:
        """Returns square tiles, or tiles of width `tile` and the given height."""
        height = height or tile
        if self.photos is not None:
            return tiles_of(self.photos, max(tile, height), count)[..., :height, :tile].contiguous().to(self.device)
        samples = np.stack([synthetic(index, tile, height) for index in range(count)])
        return torch.from_numpy(samples).to(self.device).permute(0, 3, 1, 2).float().contiguous() / 255

    def done(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def reset_peak(self) -> int:
        """Resets the peak and returns the reserved GPU memory, which includes the private pools of graphs."""
        if self.device.type != "cuda":
            return 0
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        return torch.cuda.memory_reserved(self.device)

    def peak_since(self, before: int) -> int:
        return torch.cuda.max_memory_reserved(self.device) - before if self.device.type == "cuda" else 0

    def seconds(self, call: Callable[[], object]) -> float:
        self.done()
        started = time.perf_counter()
        call()
        self.done()
        return time.perf_counter() - started

    def by_turns(self, arms: dict[Any, Callable[[], object]], enough_s: float = math.inf) -> dict[Any, list[float]]:
        """Times the arms alternately for all rounds, or after three rounds until `enough_s` have passed."""
        times: dict[Any, list[float]] = {name: [] for name in arms}
        started = time.perf_counter()
        for index in range(self.rounds):
            if index >= _LEAST_ROUNDS and time.perf_counter() - started > enough_s:
                break
            for name, call in arms.items():
                times[name].append(self.seconds(call))
        return times


@dataclass(frozen=True)
class Arm:
    """A model under a plan, with its peak memory and its worst score against fp32."""

    call: Callable[[], Tensor]
    peak_bytes: int
    setup_s: float
    score: Score


def make_arm(bench: Bench, module: nn.Module, plan: Plan, tiles: Tensor, judged: Tensor, exact: Tensor) -> Arm:
    """Applies the plan for `tiles`. Each tile of `judged` is scored as the first one of such a batch."""
    before = bench.reset_peak()
    started = time.perf_counter()
    with torch.no_grad():
        fast = plan.apply(module, samples=tiles, gates=(GATE,))
        fast(tiles)
        bench.done()
        setup_s = time.perf_counter() - started
        bench.reset_peak()
        scores = [
            GATE.judge(right[None], fast(torch.cat([each[None], tiles[1:]]))[:1])
            for each, right in zip(judged, exact, strict=True)
        ]
    # The peak includes graphs and converted weights.
    return Arm(lambda: fast(tiles), bench.peak_since(before), setup_s, worst(scores))


def synthetic(index: int, width: int, height: int) -> np.ndarray:
    """Returns an image with detail at all scales, like a photo: a sum of noise from coarse to fine."""
    rng = np.random.default_rng(index)
    total = np.zeros((height, width, 3), np.float32)
    for cells in (4, 16, 64, 256):
        coarse = Image.fromarray(rng.integers(0, 256, (cells, cells, 3), dtype=np.uint8))
        total += np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), np.float32) * (4 / cells) ** 0.5
    return (255 * (total - total.min()) / np.ptp(total)).astype(np.uint8)


def make_photos(bench: Bench, folder: Path, count: int, megapixels: float) -> list[Path]:
    """Writes JPEG files of about this size. If there are too few photos, they are repeated with a smaller crop."""
    folder.mkdir(parents=True, exist_ok=True)
    sources = (
        sorted(p for p in bench.photos.rglob("*") if p.suffix.lower() in (".jpg", ".jpeg", ".png"))
        if (bench.photos)
        else []
    )
    made = []
    for index in range(count):
        if sources:
            with Image.open(sources[index % len(sources)]) as opened:
                photo = opened.convert("RGB")
            keep = 0.95 ** (index // len(sources))
            photo = photo.crop((0, 0, round(photo.width * keep), round(photo.height * keep)))
        else:
            photo = Image.fromarray(synthetic(index, *SYNTHETIC_SIZES[index % len(SYNTHETIC_SIZES)]))
        ratio = math.sqrt(megapixels * MEGA / (photo.width * photo.height))
        size = round(photo.width * ratio), round(photo.height * ratio)
        made.append(folder / f"{index:04}.jpg")
        photo.resize(size, Image.Resampling.LANCZOS).save(made[-1], quality=92)
    return made


def sizes_of(photos: Sequence[Path]) -> list[tuple[int, int]]:
    sizes = []
    for path in photos:
        with Image.open(path) as photo:
            sizes.append(photo.size)
    return sizes


class Doubling(nn.Module):
    """The smallest possible network."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 12, 3, padding=1)

    def forward(self, tiles: Tensor) -> Tensor:
        return nn.functional.pixel_shuffle(self.convolution(tiles), 2)


class OwnMemory:
    """Samples the peak of anonymous memory, without mapped pages of files, which the kernel can drop."""

    def __init__(self, interval_s: float = 0.2) -> None:
        self.peak_bytes = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, args=(interval_s,), daemon=True)

    def __enter__(self) -> "OwnMemory":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _look(self, interval_s: float) -> None:
        while not self._done.wait(interval_s):
            for line in Path("/proc/self/status").read_text().splitlines():
                if line.startswith("RssAnon:"):
                    self.peak_bytes = max(self.peak_bytes, 1024 * int(line.split()[1]))

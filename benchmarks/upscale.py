"""Measures `redline upscale`: the model alone, photos from disk to disk, the settings of guide 4, and a huge image.

    python benchmarks/upscale.py model  --out FILE [--photos DIR]     one tile of 256 × 256 by some plans
    python benchmarks/upscale.py photos --out FILE [--photos DIR]     photos of 1 MP to PNG, against the model alone
    python benchmarks/upscale.py claims --out FILE [--photos DIR]     batches, streams, precision, memory by tile
    python benchmarks/upscale.py table  --out FILE [--photos DIR]     the guide's four settings, from disk to disk
    python benchmarks/upscale.py huge   --out FILE [--width 30000 --height 20000]

The network is DRCT-L ×4 with random weights unless --weights is given; --small uses a tiny one, to try the script.
Results are rows of ladder measurements. `claims.py` checks the claims of guide 4 against those of `claims`.
Arms are timed alternately. A time is measured on the host, from the call until the device has finished.
"""

import argparse
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from upscale_harness import MEGA, Bench, Doubling, OwnMemory, make_arm, make_photos, say, sizes_of, synthetic

from redline.errors import RedlineError
from redline.ladder.plan import Plan
from redline.ladder.plans.choose import choose_plan
from redline.machine.machine import Machine
from redline.machine.memory import MemoryMonitor, is_out_of_memory
from redline.models.drct import Drct, DrctConfig, save_drct
from redline.upscale.image_run import ImageRun
from redline.upscale.images.sink import ImageSink
from redline.upscale.network import Network, load_network
from redline.upscale.session import Upscaling
from redline.upscale.settings import ImageSettings, UpscaleSettings
from redline.upscale.tasks import Task
from redline.upscale.tile_runner import TileRunner
from redline.upscale.tiling import Cut, TileShape, Tiling, count_tiles

# How long the model alone is timed before and after the photos, which take minutes.
_MODEL_ALONE_S = 15.0


@torch.no_grad()
def measure_model(bench: Bench, tile: int, count: int, plans: Sequence[str]) -> None:
    """Times plans alternately on one tile, and scores each by the worst of `count` tiles."""
    module, all_tiles = bench.module(), bench.tiles(tile, count)
    tiles = all_tiles[:1].clone()
    exact = torch.cat([module(each[None]) for each in all_tiles])
    shipped = choose_plan("upscale", bench.machine, model=module).plan
    workload, arms = f"{tile}x{tile} tile", {}
    for plan in dict.fromkeys(["eager", *(plans or ["bf16", "compile", "bf16 + compile", str(shipped)])]):
        say(f"setting up {plan}")
        try:
            arms[plan] = make_arm(bench, module, Plan.parse(plan), tiles, all_tiles, exact)
        except RedlineError as error:
            bench.write(workload, plan, verdict="unavailable", reason=str(error))
    times = bench.by_turns({plan: arm.call for plan, arm in arms.items()})
    for plan, arm in arms.items():
        options = {
            "psnr_db": round(arm.score.value, 2),
            "tiles_compared": count,
            "output_mp_per_s": mp_per_s(exact[:1], times[plan]),
        }
        bench.write(
            workload,
            plan,
            times[plan],
            scores=(arm.score,),
            peak_bytes=arm.peak_bytes,
            setup_s={"": arm.setup_s},
            against="eager",
            old_seconds=times["eager"],
            unit="tile",
            options=options,
        )


def mp_per_s(output: Tensor, seconds: Sequence[float]) -> float:
    return round(output.shape[0] * output.shape[-1] * output.shape[-2] / MEGA / statistics.median(seconds), 3)


def upscale_all(upscaling: Upscaling, photos: Sequence[Path], folder: Path) -> None:
    outcomes = upscaling.run([Task(path, folder / f"{path.stem}.png") for path in photos])
    if failed := [outcome.error for outcome in outcomes if outcome.error]:
        raise RedlineError(failed[0])


def measure_photos(bench: Bench, count: int, megapixels: float, work: Path) -> None:
    """Times all photos from disk to disk, as a share of the model alone on the same tiles before and after."""
    say(f"making {count} photos")
    photos = make_photos(bench, work / "in", count, megapixels)
    settings = UpscaleSettings(bench.weights, device=bench.machine.device, workers=1)
    upscaling = Upscaling(settings)
    say("choosing tiles and capturing graphs")
    started = time.perf_counter()
    # Tiles are chosen for all sizes. Then one photo per shape captures its graphs.
    sizes = sizes_of(photos)
    tile_runner = upscaling.prepare(tuple(sizes))
    tiling, batch = tile_runner.tiling, tile_runner.batch
    shapes = [tiling.shape_for(size) for size in sizes]
    upscale_all(upscaling, [photos[shapes.index(shape)] for shape in set(shapes)], work / "first")
    setup_s = time.perf_counter() - started
    tiles = {shape: bench.tiles(shape.columns.tile, batch, shape.rows.tile) for shape in set(shapes)}
    alone: dict[TileShape, list[float]] = {shape: [] for shape in tiles}

    def model_alone() -> None:
        say("the model alone")
        arms: dict[TileShape, Callable[[], object]] = {s: lambda s=s: tile_runner(tiles[s]) for s in tiles}
        for shape, seconds in bench.by_turns(arms, _MODEL_ALONE_S).items():
            alone[shape] += seconds

    model_alone()
    say(f"upscaling, {batch} tiles of {tiling} at a time")
    bench.reset_peak()
    seconds = bench.seconds(lambda: upscale_all(upscaling, photos, work / "out"))
    peak = bench.peak_since(0)
    model_alone()
    scale, pixels = upscaling.network.scale, sum(width * height for width, height in sizes)
    busy_s, computed = 0.0, 0
    for (width, height), shape in zip(sizes, shapes, strict=True):
        batches = count_tiles(height, shape.rows) * math.ceil(count_tiles(width, shape.columns) / batch)
        busy_s += batches * statistics.median(alone[shape])
        computed += batches * batch * shape.pixels
    alone_px_per_s = computed / busy_s
    options = {
        "share_of_model_only": round(pixels / seconds / alone_px_per_s, 4),
        "share_of_time_in_model": round(busy_s / seconds, 4),
        "computed_over_image": round(computed / pixels, 4),
        "model_only_output_mp_per_s": round(alone_px_per_s * scale**2 / MEGA, 3),
        "output_mp_per_s": round(pixels * scale**2 / MEGA / seconds, 3),
        "tile": str(tiling),
        "tile_batch": batch,
        "photos": count,
    }
    plan = str(tile_runner.plan)
    bench.write(f"{count} photos", plan, [seconds], each=float(count), unit="photo", peak_bytes=peak,
                setup_s={"": setup_s}, options=options)  # fmt: skip


def measure_batches(bench: Bench, fp32: str, bf16: str) -> None:
    """Times batches of 256 × 256 tiles alternately, and measures the memory of the guide's table."""
    module, arms, each = bench.module(), {}, {}
    wanted = [(256, 1, fp32), (256, 1, bf16), *((256, batch, bf16) for batch in (2, 4, 8))]
    wanted += [(512, 1, fp32), (512, 1, bf16), (512, 2, bf16), (1024, 1, bf16)]
    for tile, batch, plan in wanted:
        workload = f"{tile}x{tile} batch {batch}"
        tiles = bench.tiles(tile, batch)
        try:
            with torch.no_grad():
                arm = make_arm(bench, module, Plan.parse(plan), tiles, tiles[:1], module(tiles[:1]))
        except Exception as error:
            if not isinstance(error, RedlineError) and not is_out_of_memory(error):
                raise
            bench.write(workload, plan, verdict="unavailable", reason=str(error).splitlines()[0])
            continue
        if tile == 256:
            arms[batch, plan], each[batch, plan] = arm.call, arm
            continue
        seconds = [bench.seconds(arm.call) / batch for _ in range(max(3, bench.rounds // 4))]
        bench.write(workload, plan, seconds, scores=(arm.score,), peak_bytes=arm.peak_bytes, unit="tile")
    times = bench.by_turns(arms)
    for (batch, plan), arm in each.items():
        one = fp32 if (batch, plan) == (1, bf16) else bf16
        old = times.get((1, one), []) if (batch, plan) != (1, fp32) else []
        bench.write(
            f"256x256 batch {batch}",
            plan,
            [second / batch for second in times[batch, plan]],
            scores=(arm.score,),
            peak_bytes=arm.peak_bytes,
            unit="tile",
            against=one if old else "",
            old_seconds=old,
        )


def measure_streams(bench: Bench, count: int, work: Path, precision: str) -> None:
    base = UpscaleSettings(bench.weights, device=bench.machine.device, workers=1, precision=precision)
    by_streams = {f"streams {n}": replace(base, tile=256, tile_batch=4, streams=n) for n in (1, 2, 3, 4)}
    measure_settings(bench, by_streams, count, work)


def measure_table(bench: Bench, count: int, work: Path, precisions: tuple[str, str]) -> None:
    fp32, bf16 = precisions
    base = UpscaleSettings(bench.weights, device=bench.machine.device, workers=1, precision=bf16)
    by_table = {
        "conservative": replace(base, precision=fp32, tile=256, tile_batch=1, streams=1),
        "balanced": replace(base, tile=512, tile_batch=2, streams=2),
        "aggressive": replace(base, tile=512, tile_batch=4, streams=4),
        "maximum": replace(base, tile=1024, tile_batch=2, streams=2),
    }
    measure_settings(bench, by_table, count, work)


def measure_settings(bench: Bench, group: dict[str, UpscaleSettings], count: int, work: Path) -> None:
    """Times photos from disk to disk with each of the settings alternately, against the first one."""
    photos = make_photos(bench, work / "in", count, 1.0)
    first = next(iter(group))
    runs = {name: Upscaling(settings) for name, settings in group.items()}
    peaks: dict[str, int] = {}
    times: dict[str, list[float]] = {name: [] for name in group}
    for turn in range(1 + max(2, bench.rounds // 20)):
        for name, upscaling in runs.items():
            say(f"{name}, turn {turn}")
            before = bench.reset_peak()
            seconds = bench.seconds(lambda: upscale_all(upscaling, photos, work / name))  # noqa: B023
            if turn:
                times[name].append(seconds / count)
            else:  # all persistent memory is allocated in the first turn
                peaks[name] = bench.peak_since(before)
    for name, upscaling in runs.items():
        plan, old = (str(one.tile_runner.plan) for one in (upscaling, runs[first]) if one.tile_runner is not None)
        if plan != old:
            bench.write(name, old, times[first], peak_bytes=peaks[first], unit="photo")
        others: dict[str, Any] = {} if name == first else {"against": old, "old_seconds": times[first]}
        bench.write(name, plan, times[name], peak_bytes=peaks[name], unit="photo", **others)


def measure_huge(bench: Bench, width: int, height: int, work: Path) -> None:
    """Upscales an image that does not fit in memory."""
    source, target = work / "huge.tiff", work / "enlarged.tiff"
    work.mkdir(parents=True, exist_ok=True)
    band = synthetic(0, width, 256)
    with ImageSink(source, width, height, 3, 8, memory_limit_bytes=0) as sink:
        for top in range(0, height, 256):
            sink.write_rows(np.roll(band, top // 7, axis=1)[: height - top])
    network = Network(Doubling().eval(), 2, 16, "the smallest network", "digest")
    tile_runner = TileRunner(network, Plan(), bench.device, Tiling.square(Cut(512, 16, 16, 16)), 4, streams=2)
    run = ImageRun(tile_runner, ImageSettings(max_pixels=width * height))
    with MemoryMonitor("cpu") as monitor, OwnMemory() as own:
        before = monitor.current_bytes
        started = time.perf_counter()
        (outcome,) = run.run([Task(source, target)])
        seconds = time.perf_counter() - started
        peak = monitor.peak_bytes
    if outcome.error:
        raise RedlineError(outcome.error)
    options = {
        "resident_before_bytes": before,
        "own_peak_bytes": own.peak_bytes,
        "gpu_peak_bytes": bench.peak_since(0),
        "input_mp": round(width * height / MEGA, 3),
        "input_mp_per_s": round(width * height / MEGA / seconds, 3),
        "target_bytes": target.stat().st_size,
    }
    bench.write(f"{width}x{height}", "eager", [seconds], peak_bytes=peak, unit="image", options=options)


def main() -> int:
    parser = argparse.ArgumentParser(description="Measures `redline upscale`.")
    parser.add_argument("part", choices=("model", "photos", "claims", "table", "huge"))
    parser.add_argument("--out", type=Path, required=True, help="file to which rows are appended, as JSON lines")
    parser.add_argument("--photos", type=Path, help="a folder of photos (default: synthetic ones)")
    parser.add_argument("--weights", type=Path, help="DRCT-L ×4 with random weights by default")
    parser.add_argument("--small", action="store_true", help="a tiny network, to try the script")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument(
        "--count",
        type=int,
        help="how many photos (200 for photos, 4 for claims and table), or tiles to score (1 for model)",
    )
    parser.add_argument("--plan", action="append", default=[], help="a plan to time beside eager (default: four plans)")
    parser.add_argument("--megapixels", type=float, default=1.0, help="size of each photo")
    parser.add_argument("--tile", type=int, default=256, help="tile size for model")
    parser.add_argument("--width", type=int, default=30_000)
    parser.add_argument("--height", type=int, default=20_000)
    parser.add_argument("--work", type=Path, help="a folder for images, which is kept (default: a temporary one)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="redline-bench-") as temporary:
        work, weights = arguments.work or Path(temporary), arguments.weights
        if weights is None:
            torch.manual_seed(0)
            config = (
                DrctConfig.of(4, 1, width=12, growth=6, features=4, window=4)
                if arguments.small
                else (DrctConfig.of(4, 12))
            )
            weights = Path(temporary) / "random.safetensors"
            save_drct(Drct(config), weights)
        machine = Machine.detect(arguments.device)
        bench = Bench(arguments.out, machine, weights, arguments.photos, arguments.rounds)
        precisions = ("fp32", "bf16") if machine.is_cuda else ("fp32", "auto")
        try:
            if arguments.part == "model":
                measure_model(bench, arguments.tile, arguments.count or 1, arguments.plan)
            elif arguments.part == "photos":
                measure_photos(bench, arguments.count or 200, arguments.megapixels, work)
            elif arguments.part == "claims":
                module = load_network(weights).module
                measure_batches(
                    bench, *(str(choose_plan("upscale", machine, name, model=module).plan) for name in precisions)
                )
                measure_streams(bench, arguments.count or 4, work, precisions[1])
            elif arguments.part == "table":
                measure_table(bench, arguments.count or 4, work, precisions)
            else:
                measure_huge(bench, arguments.width, arguments.height, work)
        except RedlineError as error:
            print(f"upscale: {error}", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

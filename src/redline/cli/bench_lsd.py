"""`redline bench lsd`: measures the live diffusion model by size and precision, in a real stream."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

import torch
import typer
from rich.markup import escape

from redline.cli.console import plain_table, print_json, results
from redline.cli.live_line import LiveLine
from redline.cli.options import parse_shape
from redline.ladder.plan import Plan
from redline.notation import format_bytes
from redline.stream.benchmark import benchmark_stream
from redline.stream.frame_model import without_cuda_graphs
from redline.stream.matrix import PLAIN, Row, Shape


def bench_lsd(texts: list[str], plans: list[str], device: str, save_path: Path | None, as_json: bool) -> NoReturn:
    shapes = [Shape.of(parse_shape(text)) for text in texts]
    with LiveLine("starting …") as line:
        done = benchmark_stream(shapes, plans, device, save=save_path, progress=lambda text: line.update(f"{text} …"))
    if as_json:
        print_json({**done.about, "rows": [asdict(row) for row in done.rows]})
    else:
        _print(done.rows)
    # If the user gave no plans, a failure of an arm other than PLAIN is not an error, because the built-in matrix may
    # contain precisions that this machine does not support.
    failed = any(row.failure and (plans or row.arm == PLAIN or row.device_lost) for row in done.rows)
    raise typer.Exit(1 if failed else 0)


def _name(row: Row) -> str:
    """Returns the name of the arm, and the plan that ran if it differs (bf16 instead of fp16 after an overflow)."""
    made = row.plan and Plan.parse(row.plan) != without_cuda_graphs(Plan.parse(row.arm.plan), torch.device(row.device))
    return f"{row.arm.name} (as {row.plan})" if made else row.arm.name


def _print(rows: Sequence[Row]) -> None:
    columns = ("size", "images", "steps", "arm", "model", "frames/s", "p50", "p99", "peak", "PSNR to fp32", "least")
    table = plain_table(*columns)
    for row in rows:
        shape = row.shape
        start = (shape.size, f"{shape.side}×{shape.side}", str(shape.steps), escape(_name(row)))
        if row.failure:
            table.add_row(*start, f"[dim]{escape(row.failure)}[/]")
            continue
        dbs = [f"{db:.1f} dB" if db is not None else "" for db in (row.mean_psnr_db, row.least_psnr_db)]
        times = (f"{row.model_ms:.3g} ms", f"{row.frames_per_s:.4g}", f"{row.p50_ms:.3g} ms", f"{row.p99_ms:.3g} ms")
        table.add_row(*start, *times, format_bytes(row.peak_bytes) if row.peak_bytes else "", *dbs)
    results.print(table)

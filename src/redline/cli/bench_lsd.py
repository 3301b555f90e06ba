"""`redline bench lsd`: measures the live diffusion model by size and precision, in a real stream."""

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import typer
from rich.markup import escape

from redline.cli.console import plain_table, print_json, results
from redline.cli.live_line import LiveLine
from redline.cli.options import parse_shape
from redline.errors import RedlineError
from redline.files.atomic import write_text
from redline.ladder.plan import Plan
from redline.ladder.search.run_log import command_line
from redline.machine.machine import Machine, resolve_device
from redline.models.lsd import SIZES
from redline.notation import format_bytes
from redline.stream.frame_model import without_cuda_graphs
from redline.stream.matrix import ARMS, CPU_ARMS, PLAIN, Arm, Row, Shape, measure
from redline.version import VERSION

_GRAPH, _LOOP = "graph", "loop"


def bench_lsd(texts: list[str], plans: list[str], device: str, save_path: Path | None, as_json: bool) -> None:
    where = torch.device(resolve_device(device))
    cuda = where.type == "cuda"
    shapes = [Shape.of(parse_shape(text)) for text in texts] or [Shape(size) for size in (SIZES if cuda else ("tiny",))]
    arms = [_arm(text) for text in plans] or list(ARMS if cuda else CPU_ARMS)
    if not cuda and any(arm.graph for arm in arms):
        raise RedlineError(f"a plan with `graph` needs a CUDA device, but the device is {where}.")
    rows: list[Row] = []
    machine = Machine.detect(str(where))
    about: dict[str, Any] = {"gpu": machine.name, "torch": torch.__version__, "redline": VERSION}
    about |= {"cores": machine.cores, "threads": torch.get_num_threads()}
    about["command"] = command_line(sys.argv)
    with LiveLine("starting …") as line:
        for shape in shapes:
            for row in measure(shape, arms, where, log=lambda text: line.update(f"{text} …")):
                rows.append(row)
                if save_path is not None:
                    write_text(save_path, "".join(json.dumps(about | asdict(one)) + "\n" for one in rows))
            if rows and rows[-1].device_lost:
                break
    if as_json:
        print_json({**about, "rows": [asdict(row) for row in rows]})
    else:
        _print(rows)
    # If the user gave no plans, a failure of an arm other than PLAIN is not an error, because the built-in matrix may
    # contain precisions that this machine does not support.
    raise typer.Exit(1 if any(row.failure and (plans or row.arm == PLAIN or row.device_lost) for row in rows) else 0)


def _arm(text: str) -> Arm:
    """Parses `fp16 + compile + graph`: a plan, `graph` (use CUDA graphs), `loop` (no overlap with input and output)."""
    parts = [part.strip() for part in text.split("+")]
    plan = " + ".join(part for part in parts if part not in (_GRAPH, _LOOP)) or "eager"
    Plan.parse(plan)
    arm = Arm(text, plan, _GRAPH in parts, _LOOP not in parts)
    return PLAIN if replace(arm, name=PLAIN.name) == PLAIN else arm


def _name(row: Row) -> str:
    """Returns the name of the arm, and the plan that ran if it differs (bf16 instead of fp16 after an overflow)."""
    made = row.plan and Plan.parse(row.plan) != without_cuda_graphs(Plan.parse(row.arm.plan), torch.device(row.device))
    return f"{row.arm.name} (as {row.plan})" if made else row.arm.name


def _print(rows: list[Row]) -> None:
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

"""`redline eval`: scores models with the metrics of their field."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from redline.cli.console import print_json, progress, results
from redline.cli.eval_drift import evaluate_drift
from redline.cli.eval_memory import evaluate_memory
from redline.cli.live_line import LiveLine
from redline.cli.signals import uninterrupted_imports

if TYPE_CHECKING:
    from redline.evaluation.super_resolution import Evaluation, ImageScores

eval = typer.Typer(
    help="Score a model with the metrics of its field.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@eval.callback()
def _eval() -> None:
    """Score a model with the metrics of its field."""


eval.command("memory")(evaluate_memory)
eval.command("drift")(evaluate_drift)


@eval.command("sr")
def evaluate_sr(
    weights: Annotated[str, typer.Argument(help="Weights of a DRCT, or the word bicubic.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of large images, with or without small ones.")],
    scale: Annotated[int | None, typer.Option(help="The scale factor. Default: that of the weights.")] = None,
    bicubic: Annotated[bool, typer.Option("--bicubic", help="Also score bicubic interpolation.")] = False,
    precision: Annotated[str, typer.Option(help="fp32 or bf16.")] = "fp32",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 or auto.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure PSNR and SSIM on luma, as super-resolution papers do.

    Example: redline eval sr model.safetensors Set5 --bicubic
    """
    with uninterrupted_imports():
        from redline.evaluation.super_resolution import evaluate_folder
    with LiveLine("scoring …") as line:
        show = _counter(line, "scoring")
        seen = evaluate_folder(weights, folder, scale, precision=precision, device=device, progress=show)
        baseline = None
        if bicubic:
            show = _counter(line, "scoring bicubic")
            baseline = evaluate_folder("bicubic", folder, seen.scale, device=device, progress=show)
    made = sum(image.made for image in seen.images)
    if made:
        which = "all" if made == len(seen.images) else f"{made} of {len(seen.images)}"
        progress.print(f"[dim]small images: {which} made from the large ones by bicubic[/]", highlight=False)
    if as_json:
        print_json(_as_dict(weights, folder, seen, baseline))
    else:
        _print(seen, baseline)


def _counter(line: LiveLine, what: str) -> Callable[[ImageScores | None, int, int], None]:
    def show(scores: ImageScores | None, done: int, total: int) -> None:
        detail = f"{scores.name}: {scores.psnr_y_db:.2f} dB" if scores is not None else ""
        line.count(what, done, total, "image", detail)

    return show


def _print(seen: Evaluation, baseline: Evaluation | None) -> None:
    more = ("bicubic dB", "SSIM-Y", "gain") if baseline else ()
    table = Table("image", "size", "PSNR-Y dB", "SSIM-Y", *more, box=None, pad_edge=False)
    rows = [(escape(p.name), f"{p.width_px} × {p.height_px}", p.psnr_y_db, p.ssim_y) for p in seen.images]
    rows.append((f"[bold]mean of {len(rows)}[/]", "", seen.mean.psnr_y_db, seen.mean.ssim_y))
    others = [*baseline.images, baseline.mean] if baseline else [None] * len(rows)
    for (name, size, psnr, ssim), other in zip(rows, others, strict=True):
        cells = [name, size, f"{psnr:.2f}", f"{ssim:.4f}"]
        if other is not None:
            cells += [f"{other.psnr_y_db:.2f}", f"{other.ssim_y:.4f}", f"{psnr - other.psnr_y_db:+.2f}"]
        table.add_row(*cells)
    results.print(table)


def _as_dict(weights: str, folder: Path, seen: Evaluation, baseline: Evaluation | None) -> dict[str, object]:
    data: dict[str, object] = {
        "weights": weights,
        "folder": str(folder),
        "scale": seen.scale,
        "mean": asdict(seen.mean),
        "pictures": [asdict(image) for image in seen.images],
    }
    if baseline is not None:
        data["bicubic"] = {"mean": asdict(baseline.mean), "pictures": [asdict(p) for p in baseline.images]}
    return data

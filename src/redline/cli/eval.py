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
from redline.errors import RedlineError
from redline.training.settings import check_choice

if TYPE_CHECKING:
    import torch

    from redline.evaluation.super_resolution import Evaluation
    from redline.evaluation.super_resolution.evaluate import Model, PictureScores

_BICUBIC = "bicubic"

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
        import torch

        from redline.evaluation.super_resolution import bicubic_model, evaluate, find_pairs
        from redline.machine.machine import resolve_device
        from redline.training.precision import computing_in
    check_choice("precision", precision, ("fp32", "bf16"))
    where = torch.device(resolve_device(device))
    pairs = find_pairs(folder)
    model, factor, window = _model(weights, scale, where)
    with LiveLine("scoring …") as line:
        with computing_in(precision, where):
            seen = evaluate(model, pairs, factor, window, where, _counter(line, "scoring", len(pairs)))
        tell = _counter(line, "scoring bicubic", len(pairs))
        baseline = evaluate(bicubic_model(factor), pairs, factor, device=where, tell=tell) if bicubic else None
    made = sum(picture.made for picture in seen.pictures)
    if made:
        which = "all" if made == len(seen.pictures) else f"{made} of {len(seen.pictures)}"
        progress.print(f"[dim]small images: {which} made from the large ones by bicubic[/]", highlight=False)
    if as_json:
        print_json(_as_dict(weights, folder, seen, baseline))
    else:
        _print(seen, baseline)


def _counter(line: LiveLine, what: str, total: int) -> Callable[[PictureScores], None]:
    done = 0
    line.count(what, done, total, "image")

    def tell(picture: PictureScores) -> None:
        nonlocal done
        done += 1
        line.count(what, done, total, "image", f"{picture.name}: {picture.psnr_y_db:.2f} dB")

    return tell


def _model(weights: str, scale: int | None, device: torch.device) -> tuple[Model, int, int]:
    from redline.evaluation.super_resolution import bicubic_model
    from redline.models.drct import load_drct

    if weights == _BICUBIC:
        if scale is None or scale < 1:
            raise RedlineError("bicubic needs --scale, such as --scale 4.")
        return bicubic_model(scale), scale, 1
    model = load_drct(weights).to(device)
    if scale not in (None, model.config.scale):
        raise RedlineError(f"{weights!r} has scale {model.config.scale}, not {scale}: leave out --scale.")
    return model, model.config.scale, model.config.window


def _print(seen: Evaluation, baseline: Evaluation | None) -> None:
    more = ("bicubic dB", "SSIM-Y", "gain") if baseline else ()
    table = Table("image", "size", "PSNR-Y dB", "SSIM-Y", *more, box=None, pad_edge=False)
    rows = [(escape(p.name), f"{p.width_px} × {p.height_px}", p.psnr_y_db, p.ssim_y) for p in seen.pictures]
    rows.append((f"[bold]mean of {len(rows)}[/]", "", seen.mean.psnr_y_db, seen.mean.ssim_y))
    others = [*baseline.pictures, baseline.mean] if baseline else [None] * len(rows)
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
        "pictures": [asdict(picture) for picture in seen.pictures],
    }
    if baseline is not None:
        data["bicubic"] = {"mean": asdict(baseline.mean), "pictures": [asdict(p) for p in baseline.pictures]}
    return data

"""Prints the result of a training, by kind of model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from redline.cli.console import print_json, results
from redline.notation import format_bytes, format_seconds

if TYPE_CHECKING:
    from redline.training.run import TrainingResult


def print_text(result: TrainingResult, as_json: bool) -> None:
    output: Any = result.output
    if as_json:
        _print_json(result, {**asdict(output), "skipped": result.skipped_steps})
        return
    figures = "".join(f", {name.replace('_', ' ')} {value:.4f}" for name, value in result.figures.items())
    skipped = f" ({result.skipped_steps:,} of them skipped)" if result.skipped_steps else ""
    results.print(
        f"[bold]{output.model}[/]: {output.parameters:,} parameters, {result.steps:,} steps{skipped} in "
        f"{format_seconds(result.elapsed_s)}{figures}; summary: {output.page}",
        highlight=False,
    )


def print_drct(result: TrainingResult, as_json: bool) -> None:
    output: Any = result.output
    if as_json:
        scores = {
            name: {Path(folder).name: asdict(found.mean) for folder, found in table.items()}
            for name, table in (("scores", output.scores), ("bicubic", output.bicubic))
        }
        _print_json(result, _about_weights(output) | scores)
        return
    table = Table("test set", "PSNR-Y dB", "SSIM-Y", "bicubic", "", box=None, pad_edge=False)
    for folder, found in output.scores.items():
        mean, baseline = found.mean, output.bicubic[folder].mean
        table.add_row(
            Path(folder).name,
            f"[bold]{mean.psnr_y_db:.2f}[/]",
            f"{mean.ssim_y:.4f}",
            f"{baseline.psnr_y_db:.2f}",
            f"{mean.psnr_y_db - baseline.psnr_y_db:+.2f} dB",
        )
    _print_weights(result, table)


def print_lsd(result: TrainingResult, as_json: bool) -> None:
    output: Any = result.output
    if as_json:
        scores = {name: asdict(found) for name, found in output.scores.items()}
        _print_json(result, {**_about_weights(output), "stage": output.stage, "scores": scores})
        return
    columns = ("test set", "PSNR dB", "input", "warp error", "frame by frame", "drift dB")
    table = Table(*columns, box=None, pad_edge=False)
    for name, found in output.scores.items():
        table.add_row(
            name,
            f"[bold]{found.psnr_db:.2f}[/]",
            f"{found.input_psnr_db:.2f}",
            f"[bold]{found.warp_error:.5f}[/]",
            f"{found.alone_warp_error:.5f}",
            f"{found.drift_db:+.2f}",
        )
    _print_weights(result, table, f", up to {output.stage}")


def _about_weights(output: Any) -> dict[str, object]:
    return {name: getattr(output, name) for name in ("weights", "card", "parameters", "model_bytes")}


def _print_json(result: TrainingResult, about: Mapping[str, object]) -> None:
    print_json({**about, "steps": result.steps, "elapsed_s": result.elapsed_s, "peak_bytes": result.peak_bytes})


def _print_weights(result: TrainingResult, table: Table, stage: str = "") -> None:
    output: Any = result.output
    if output.scores:
        results.print(table)
    results.print(
        f"[bold]{output.weights}[/]: {output.parameters:,} parameters, {format_bytes(output.model_bytes)}, "
        f"{result.steps:,} steps in {format_seconds(result.elapsed_s)}{stage}; model card: {output.card}",
        highlight=False,
    )

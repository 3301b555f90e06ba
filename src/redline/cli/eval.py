"""`redline eval`: scores models with the metrics of their field."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table
from typer import Argument, Option

from redline.cli import LOOK
from redline.cli.console import NO, YES, note, plain_table, print_json, results, warnings_as_sentences, wrote
from redline.cli.live_line import LiveLine
from redline.cli.options import MODEL_HELP, PLAN_HELP, AsJson, Device, Page, Sampler, Steps, Strength, Strict
from redline.cli.signals import uninterrupted_imports
from redline.errors import RedlineError
from redline.files.atomic import check_can_write_file, write_text
from redline.notation import format_bytes, format_seconds
from redline.stream.metrics_file import check_output_path

if TYPE_CHECKING:
    from redline.evaluation.recall import LossRow, RecallRow
    from redline.evaluation.super_resolution import Evaluation, ImageScores
    from redline.stream.drift import DriftResult

eval = typer.Typer(**LOOK, help="Score a model with the metrics of its field.", no_args_is_help=True)


@eval.callback()
def _eval() -> None:
    """Score a model with the metrics of its field."""


@eval.command("sr")
def evaluate_sr(
    weights: Annotated[str, Argument(help="Weights of a DRCT, or the word bicubic.")],
    folder: Annotated[
        Path, Argument(metavar="DIR", help="Folder of high-resolution images, optionally with low-resolution ones.")
    ],
    scale: Annotated[int | None, Option(help="Upscaling factor (default: the factor of the weights).")] = None,
    bicubic: Annotated[bool, Option("--bicubic", help="Also score bicubic interpolation.")] = False,
    precision: Annotated[str, Option(help="fp32 or bf16.")] = "fp32",
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Measure PSNR and SSIM on luma, as super-resolution papers do.

    Example: redline eval sr model.safetensors Set5 --bicubic
    """
    with uninterrupted_imports():
        from redline import evaluate_super_resolution
    with LiveLine("scoring …") as line:
        show = _counter(line, "scoring")
        seen = evaluate_super_resolution(weights, folder, scale, precision=precision, device=device, progress=show)
        baseline = None
        if bicubic:
            show = _counter(line, "scoring bicubic")
            baseline = evaluate_super_resolution("bicubic", folder, seen.scale, device=device, progress=show)
    made = sum(image.made for image in seen.images)
    if made:
        which = "all" if made == len(seen.images) else f"{made} of {len(seen.images)}"
        note(f"low-resolution images: {which} made from the high-resolution ones by bicubic downscaling")
    if as_json:
        print_json(_as_dict(weights, folder, seen, baseline))
    else:
        _print_sr(seen, baseline)


def _counter(line: LiveLine, what: str) -> Callable[[ImageScores | None, int, int], None]:
    def show(scores: ImageScores | None, done: int, total: int) -> None:
        detail = f"{scores.name}: {scores.psnr_y_db:.2f} dB" if scores is not None else ""
        line.count(what, done, total, "image", detail)

    return show


def _print_sr(seen: Evaluation, baseline: Evaluation | None) -> None:
    more = ("bicubic dB", "SSIM-Y", "gain") if baseline else ()
    table = plain_table("image", "size", "PSNR-Y dB", "SSIM-Y", *more)
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
        "images": [asdict(image) for image in seen.images],
    }
    if baseline is not None:
        data["bicubic"] = {"mean": asdict(baseline.mean), "images": [asdict(p) for p in baseline.images]}
    return data


@eval.command("memory")
def evaluate_memory(
    model: Annotated[
        str, Argument(help="Folder with config.json and safetensors, or a model in the Hugging Face cache.")
    ],
    task: Annotated[
        list[str] | None,
        Option(
            help="mqar, needle, passkey, number, word, or none to measure only --text; repeatable "
            "(default: the trained task)."
        ),
    ] = None,
    lengths: Annotated[list[str] | None, Option(help="Text lengths in tokens, such as 1024,4096; repeatable.")] = None,
    samples: Annotated[int, Option(help="Number of texts of each length.")] = 64,
    batch: Annotated[int | None, Option(help="Texts per batch (default: depends on length and model).")] = None,
    text: Annotated[Path | None, Option(help="Also measure the loss by position on this text file.")] = None,
    seed: Annotated[int, Option(help="Seed of the questions.")] = 0,
    precision: Annotated[str, Option(help="auto, fp32, bf16 or fp16.")] = "auto",
    device: Device = "auto",
    page: Page = None,
    strict: Strict = False,
    as_json: AsJson = False,
) -> None:
    """Measure the recall of a language model, and the bytes of its state, as its text grows.

    Example: redline eval memory out/model --lengths 1024,4096,16384 --page memory.html
    """
    with uninterrupted_imports():
        from redline.generation.memory_evaluation import evaluate_memory as evaluate
    tasks = [] if task == ["none"] else task or None
    if page is not None:
        check_can_write_file(page)
    options: dict[str, Any] = {"seed": seed, "precision": precision, "device": device, "strict": strict}
    options |= {"tasks": tasks, "lengths": _parse(lengths), "samples": samples, "batch": batch, "text": text}
    with warnings_as_sentences(), LiveLine("reading the model …") as line:
        found = evaluate(model, log=lambda text: note(text, "yellow"), status=line.update, **options)
    if as_json:
        rows, losses = ([asdict(row) for row in table] for table in (found.recall, found.loss))
        print_json({"model": model, "recall": rows, "loss": losses})
    else:
        _print_memory(found.recall, found.loss)
    # The page is written last, so that the results are printed even if writing fails.
    if page is not None:
        write_text(page, found.to_html())
        wrote(page)


def _parse(lengths: list[str] | None) -> list[int] | None:
    try:
        return [int(part) for parts in lengths for part in parts.split(",")] if lengths else None
    except ValueError as error:
        given = ",".join(lengths or [])
        raise RedlineError(f"--lengths must be whole numbers such as 1024,4096, not {given!r}.") from error


def _numbers_table(first: str, *numbers: str) -> Table:
    table = plain_table(first)
    for name in numbers:
        table.add_column(name, justify="right")
    return table


def _print_memory(rows: list[RecallRow], losses: list[LossRow]) -> None:
    if rows:
        table = _numbers_table("task", "tokens", "right", "asked", "held", "took")
        for row in rows:
            share = f"[bold]{row.accuracy:.1%}[/]"
            held, took = format_bytes(row.state_bytes), format_seconds(row.seconds)
            table.add_row(row.task, f"{row.length:,}", share, f"{row.asked:,}", held, took)
        results.print(table)
    if rows and losses:
        results.print()
    if losses:
        table = _numbers_table("tokens before", "loss", "tokens")
        for loss in losses:
            table.add_row(f"{loss.first:,}–{loss.last:,}", f"[bold]{loss.loss:.4f}[/]", f"{loss.tokens:,}")
        results.print(table)


@eval.command("drift")
def evaluate_drift(
    model: Annotated[Path, Argument(help=f"{MODEL_HELP}.")],
    clip: Annotated[Path, Argument(help="A video, or a folder of photos over which a virtual camera moves.")],
    frames: Annotated[int, Option(help="Number of frames per case.")] = 1000,
    size: Annotated[int, Option(help="Side of clips made from photos, in pixels.")] = 256,
    steps: Steps = None,
    sampler: Sampler = None,
    strength: Strength = None,
    seed: Annotated[int, Option(help="The same seed makes the same clips and noise.")] = 0,
    plan: Annotated[str, Option(help=PLAN_HELP)] = "eager",
    device: Device = "auto",
    controls: Annotated[bool, Option(help="Check that trivial models (constant, noise, identity) fail.")] = True,
    page: Page = None,
    out: Annotated[Path | None, Option(help="Write the metrics of every frame as JSON lines.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure a live model over a thousand frames: colours, contrast, detail, structure, flicker, and response.

    Photos are turned into three cases whose motion is known exactly: a moving camera, a still one, and a hard cut.
    The exit code is 1 if a check fails or a trivial control model passes.

    Example: redline eval drift lsd-tiny.safetensors photos --page drift.html
    """
    with uninterrupted_imports():
        from redline import evaluate_drift as evaluate
    others = {"model": model, "clip": clip}
    if page is not None:
        check_output_path(page, others)
    if out is not None:
        check_output_path(out, {**others, "page": page})
    with LiveLine("setting up …") as line:
        result = evaluate(
            model,
            clip,
            frames=frames,
            size=size,
            steps=steps,
            sampler=sampler,
            strength=strength,
            seed=seed,
            plan=plan,
            device=device,
            controls=controls,
            progress=lambda name, frame, total: line.count(name, frame, total, "frame"),
        )
    if out is not None:
        result.write_rows(out)
    if page is not None:
        result.write_page(page)
        wrote(page)
    if as_json:
        data: dict[str, Any] = {"model": str(model), "clip": str(clip), "steps": result.steps, "plan": str(result.plan)}
        data["findings"] = [asdict(finding) for finding in result.findings]
        print_json({**data, "controls_that_passed": result.controls_that_passed})
    else:
        _print_drift(result)
    raise typer.Exit(0 if result.is_stable and not result.controls_that_passed else 1)


def _print_drift(result: DriftResult) -> None:
    from redline.evaluation.drift.page import headline

    table = plain_table("case", "finding", "holds", "measured")
    for finding in result.findings:
        table.add_row(finding.case, finding.name, YES if finding.holds else NO, escape(finding.sentence))
    results.print(table)
    if passed := result.controls_that_passed:
        results.print(f"[bold red]this evaluation is meaningless[/]: the controls {', '.join(passed)} passed it")
    elif result.controls:
        results.print(f"[dim]the controls failed, as they must: {', '.join(result.controls)}[/]")
    verdict = "[bold green]stable[/]" if result.is_stable else "[bold red]not stable[/]"
    results.print(f"{verdict}. {escape(headline(result.findings))}")

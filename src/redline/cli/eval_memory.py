"""`redline eval memory`: the recall of a language model, and the bytes of its state, as its text grows."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from redline.cli.console import print_json, progress, results, warnings_as_sentences
from redline.cli.live_line import LiveLine
from redline.cli.signals import uninterrupted_imports
from redline.errors import RedlineError
from redline.files.atomic import check_can_write_file, write_text
from redline.notation import format_bytes, format_seconds

if TYPE_CHECKING:
    from redline.evaluation.recall import LossRow, RecallRow


def evaluate_memory(
    model: Annotated[
        str,
        typer.Argument(help="A folder with config.json and safetensors, or a model in the Hugging Face cache."),
    ],
    task: Annotated[
        list[str] | None,
        typer.Option(
            help="mqar, needle, passkey, number or word; repeatable. none: only --text. Default: the model's own task."
        ),
    ] = None,
    lengths: Annotated[
        list[str] | None, typer.Option(help="Lengths of the texts in tokens, such as 1024,4096,16384; repeatable.")
    ] = None,
    samples: Annotated[int, typer.Option(help="Number of texts of each length.")] = 64,
    batch: Annotated[int | None, typer.Option(help="Texts per batch. Default: by length and model.")] = None,
    text: Annotated[Path | None, typer.Option(help="Text file: also measure its loss by position.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the questions.")] = 0,
    precision: Annotated[str, typer.Option(help="auto, fp32, bf16 or fp16.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 or auto.")] = "auto",
    page: Annotated[Path | None, typer.Option(help="Write an HTML page with the curves to this file.")] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Raise an error for every unknown key of config.json.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
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
    with warnings_as_sentences(), LiveLine("reading the model …") as line:
        options |= {"log": _print_note, "status": line.update}
        found = evaluate(
            model, tasks=tasks, lengths=_parse(lengths), samples=samples, batch=batch, text=text, **options
        )
    if as_json:
        rows, losses = ([asdict(row) for row in table] for table in (found.recall, found.loss))
        print_json({"model": model, "recall": rows, "loss": losses})
    else:
        _print_memory(found.recall, found.loss)
    # Written last, so that the results are printed even if it cannot be written.
    if page is not None:
        write_text(page, found.to_html())
        progress.print(f"wrote {escape(str(page))}", highlight=False, soft_wrap=True)


def _print_note(message: str) -> None:
    progress.print(f"[yellow]{escape(message)}[/]", highlight=False)


def _parse(lengths: list[str] | None) -> list[int] | None:
    try:
        return [int(part) for parts in lengths for part in parts.split(",")] if lengths else None
    except ValueError as error:
        given = ",".join(lengths or [])
        raise RedlineError(f"--lengths must be whole numbers such as 1024,4096, not {given!r}.") from error


def _print_memory(rows: list[RecallRow], losses: list[LossRow]) -> None:
    if rows:
        table = Table("task", box=None, pad_edge=False)
        for name in ("tokens", "right", "asked", "held", "took"):
            table.add_column(name, justify="right")
        for row in rows:
            share = f"[bold]{row.accuracy:.1%}[/]"
            held, took = format_bytes(row.state_bytes), format_seconds(row.seconds)
            table.add_row(row.task, f"{row.length:,}", share, f"{row.asked:,}", held, took)
        results.print(table)
    if rows and losses:
        results.print()
    if losses:
        table = Table("tokens before", box=None, pad_edge=False)
        for name in ("loss", "tokens"):
            table.add_column(name, justify="right")
        for loss in losses:
            table.add_row(f"{loss.first:,}–{loss.last:,}", f"[bold]{loss.loss:.4f}[/]", f"{loss.tokens:,}")
        results.print(table)

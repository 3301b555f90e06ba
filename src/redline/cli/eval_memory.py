"""`redline eval memory`: what a language model recalls as its text grows, and what it holds for it."""

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
from redline.errors import ModelError, RedlineError
from redline.files.atomic import check_can_write_file, write_text
from redline.notation import format_bytes, format_seconds
from redline.training.settings import check_choice

if TYPE_CHECKING:
    from redline.evaluation.recall import LossRow, Recall, RecallRow
    from redline.generation.folder import ModelFolder

_LENGTHS = (1024, 2048, 4096, 8192, 16384)


def evaluate_memory(
    model: Annotated[
        str,
        typer.Argument(help="A folder with config.json and safetensors, or a model in the Hugging Face cache."),
    ],
    task: Annotated[
        list[str] | None,
        typer.Option(
            help="mqar, needle, passkey, number or word; repeatable. none: only --text. Default: the model's task."
        ),
    ] = None,
    lengths: Annotated[
        list[str] | None, typer.Option(help="Tokens of the texts, such as 1024,4096,16384; repeatable.")
    ] = None,
    samples: Annotated[int, typer.Option(help="Texts of each length.")] = 64,
    batch: Annotated[int | None, typer.Option(help="Texts at once; by length and model unless given.")] = None,
    text: Annotated[Path | None, typer.Option(help="A text file: its loss by position.")] = None,
    seed: Annotated[int, typer.Option(help="The same seed asks the same questions.")] = 0,
    precision: Annotated[str, typer.Option(help="auto, fp32, bf16 or fp16.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 or auto.")] = "auto",
    page: Annotated[Path | None, typer.Option(help="Write a page with the curves here.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Refuse every unknown key of config.json.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """What a language model recalls as its text grows, and what it holds for it.

    Example: redline eval memory out/model --lengths 1024,4096,16384 --page memory.html
    """
    with uninterrupted_imports():
        import torch

        from redline.evaluation.recall import evaluate, loss_by_position
        from redline.evaluation.recall.evaluate import check_counts, check_tasks
        from redline.evaluation.recall.page import Subject, render_page
        from redline.generation.precision import choose_holding
        from redline.machine.machine import Machine, resolve_device
    check_choice("precision", precision, ("auto", "fp32", "bf16", "fp16"))
    check_counts(samples, batch, seed)
    folder, own = _language_folder(model)
    tasks = [] if task == ["none"] else _tasks(task or [], own, folder)
    if not tasks and text is None:
        raise RedlineError("without a task there is nothing to ask: give a text with --text.")
    content = None if text is None else _read_text(text, folder)
    if page is not None:
        check_can_write_file(page)
    where = torch.device(resolve_device(device))
    dtype = choose_holding(Machine.detect(str(where)), precision).dtype
    with warnings_as_sentences(), LiveLine("reading the model …") as line:
        loaded: Any = folder.load(dtype, where, strict)
        tell = line.update
        sizes, note = _lengths(lengths, loaded.context)
        check_tasks(loaded, tasks, sizes, folder.tokenizer)
        if note:
            progress.print(note, highlight=False)
        rows = evaluate(loaded, tasks, sizes, samples, batch, where, folder.tokenizer, seed, tell)
        losses = []
        if content is not None:
            tokens = folder.tokenizer.encode(content).ids
            losses = loss_by_position(loaded, tokens, max(sizes), samples, where, tell)
    if as_json:
        print_json({"model": model, "recall": [asdict(r) for r in rows], "loss": [asdict(r) for r in losses]})
    else:
        _print_memory(rows, losses)
    # Last: a page that cannot be written costs nothing of what was found.
    if page is not None:
        about = f"{where} · {str(dtype).removeprefix('torch.')} · torch {torch.__version__}"
        parameters = sum(weight.numel() for weight in loaded.parameters())
        place = folder.path.resolve()
        # A training's folder has the name, and its model lies in it; a snapshot in the cache is named by its commit.
        name = place.parent.name if place.name == "model" else place.name if Path(model).is_dir() else model
        write_text(page, render_page(Subject(name, f"{parameters / 1e6:,.4g}M parameters · {about}"), rows, losses))
        progress.print(f"wrote {escape(str(page))}", highlight=False, soft_wrap=True)


def _language_folder(path: str) -> tuple[ModelFolder, Recall | None]:
    """A model's folder, and the recall task that it was trained on; of symbols, it has no tokenizer."""
    from redline.evaluation.recall import task_in
    from redline.generation.folder import LOADERS, ModelFolder, read_config
    from redline.generation.hub_cache import find_model

    place = find_model(path)
    if (place / "tokenizer.json").exists():
        folder = ModelFolder.open(place)
    else:
        kind = str(read_config(place).get("model_type"))
        if kind not in LOADERS:
            raise ModelError(f"{path!r} is of the architecture {kind!r}, which is not known: {', '.join(LOADERS)} are.")
        folder = ModelFolder(place, kind, None, 0, ())
    return folder, task_in(read_config(place))


def _tasks(names: list[str], own: Recall | None, folder: ModelFolder) -> list[Recall]:
    from redline.evaluation.recall import make_task
    from redline.evaluation.recall.passkey import KINDS
    from redline.evaluation.recall.tasks import SYMBOLIC, name_of

    if not names:
        if own is not None:
            return [own]
        if folder.tokenizer is None:
            raise RedlineError(f"{str(folder.path)!r} has no tokenizer.json and was trained on no recall task.")
        return [make_task(name) for name in KINDS]
    found = []
    for name in dict.fromkeys(names):
        if own is not None and name_of(own) == name:
            found.append(own)
            continue
        made = make_task(name)
        if name in SYMBOLIC:
            raise RedlineError(
                f"{str(folder.path)!r} was not trained on {name}, whose symbols only such a model knows."
            )
        if folder.tokenizer is None:
            raise RedlineError(f"{name} is asked in text, and {str(folder.path)!r} has no tokenizer.json.")
        found.append(made)
    return found


def _lengths(given: list[str] | None, context: int | None) -> tuple[list[int], str]:
    """Returns the lengths that fit into the context, and a message about those that do not."""
    if not given:
        fitting = [length for length in _LENGTHS if context is None or length <= context]
        skips = len(fitting) < len(_LENGTHS)
        note = f"[dim]the model's context is {context:,} tokens: no text is longer[/]" if skips else ""
        return fitting or [context or _LENGTHS[0]], note
    try:
        lengths = sorted({int(part) for parts in given for part in parts.split(",")})
    except ValueError as error:
        raise RedlineError(f"lengths are whole numbers such as 1024,4096, not {','.join(given)!r}.") from error
    skipped = [length for length in lengths if context is not None and length > context]
    fitting = lengths[: len(lengths) - len(skipped)]
    named = ", ".join(f"{length:,}" for length in skipped)
    if not fitting:
        raise RedlineError(f"--lengths {named}: longer than the model's context of {context:,} tokens.")
    said = f"[yellow]skipped lengths beyond the model's context of {context:,} tokens: {named}[/]" if skipped else ""
    return fitting, said


def _read_text(path: Path, folder: ModelFolder) -> str:
    if folder.tokenizer is None:
        raise RedlineError(f"{str(folder.path)!r} has no tokenizer.json, so the loss of a text cannot be had.")
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise RedlineError(f"cannot read {str(path)!r}: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise RedlineError(f"{str(path)!r} is not UTF-8 text.") from error


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

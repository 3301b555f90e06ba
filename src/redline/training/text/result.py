"""Writes the result of training on text: a model folder with its tokenizer, and a summary page with curves."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from redline.evaluation.recall.tasks import describe
from redline.files.atomic import write_text
from redline.notation import format_bytes, format_seconds
from redline.pages import ChartCard, Tile, render_page
from redline.pages.curves import Curve, draw_curves
from redline.training.loop import Outcome
from redline.training.model_card import device_name
from redline.training.text.task import LanguageTask

MODEL, PAGE = "model", "summary.html"


@dataclass(frozen=True)
class TextResult:
    model: Path
    page: Path
    parameters: int
    loss: float | None
    figures: dict[str, float]
    tokens: int
    tokens_per_s: float | None
    utilization: float | None
    padding_share: float | None


def write_result(task: LanguageTask, outcome: Outcome, out: Path, active: list[str]) -> TextResult:
    """Writes the weights in fp32 and a summary page made from the journal."""
    task.save(outcome.model, out / MODEL)
    result = TextResult(
        out / MODEL,
        out / PAGE,
        sum(weight.numel() for weight in outcome.model.parameters()),
        outcome.loss,
        outcome.figures,
        outcome.position.step * task.items_per_step,
        outcome.median("items_per_s"),
        outcome.median("utilization"),
        task.padding_share,
    )
    write_text(out / PAGE, _page(task, outcome, result, active))
    return result


def _page(task: LanguageTask, outcome: Outcome, result: TextResult, active: list[str]) -> str:
    position = outcome.position
    settings: dict[str, Any] = asdict(task.training)
    # The page shows only the names of files, not their paths.
    settings["data"]["sources"] = [Path(place).name for place in task.training.data.sources]
    settings["data"].pop("shards")
    settings["tokenizer"]["file"] = Path(task.training.tokenizer.file).name
    settings["recall"] = describe(task.training.recall) if task.training.recall else None

    def curve(metric: str, name: str = "", kind: str = "c0") -> Curve:
        return Curve(name or metric, outcome.series(metric), kind)

    recall = "The share of queried tokens that were predicted correctly."
    charts = (
        ("Loss", _about_loss(outcome), (curve("loss", "training"), curve("validation_loss", "validation", "c1"))),
        ("Recall", recall, (curve("recall"),)),
        ("Speed", "Tokens per second.", (curve("items_per_s", "tokens/s"),)),
        ("Gradient", "The gradient norm before clipping.", (curve("gradient_norm"),)),
        ("Learning rate", "The learning rate of the schedule.", (curve("learning_rate"),)),
    )
    drawn = [ChartCard(name, note, draw_curves(name, curves, name.split()[0].lower())) for name, note, curves in charts]
    return render_page(
        "redline.training",
        "summary.html.jinja",
        name=f"{task.training.kind}, {result.parameters / 1e6:,.4g}M parameters",
        meta=f"{device_name(task.device)} · torch {torch.__version__} · {task.trained.precision}",
        headline=_headline(result, position.step, position.elapsed_s),
        tiles=_tiles(task, outcome, result),
        charts=[chart for chart in drawn if chart.drawing],
        active=active,
        settings=json.dumps(settings, indent=2),
    )


def _about_loss(outcome: Outcome) -> str:
    penalties = sorted({name for entry in outcome.entries for name in entry.penalties})
    if not penalties:
        return "Nats per token; validation in the second colour."
    held = " and ".join(penalties)
    return f"Nats per token. The training loss includes {held}; the validation loss (second colour) does not."


def _headline(result: TextResult, steps: int, elapsed_s: float) -> str:
    done = f"{result.tokens:,} tokens in {steps:,} steps and {format_seconds(elapsed_s)}"
    if "recall" in result.figures:
        return f"{done}; the final recall is {result.figures['recall']:.1%}."
    if "validation_loss" in result.figures:
        return f"{done}; the final validation loss is {result.figures['validation_loss']:.4f}."
    return f"{done}." if result.loss is None else f"{done}; the final loss is {result.loss:.4f}."


def _tiles(task: LanguageTask, outcome: Outcome, result: TextResult) -> list[Tile]:
    tiles = [Tile("tokens per second", f"{result.tokens_per_s:,.0f}", "median")] if result.tokens_per_s else []
    if result.utilization:
        tiles.append(Tile("of the machine's ceiling", f"{result.utilization:.1%}", "achieved / measured peak FLOP/s"))
    tiles.append(Tile("peak memory", format_bytes(outcome.peak_bytes)))
    if result.padding_share is not None:
        batch = f"of tokens, at batch {task.training.data.batch}"
        tiles.append(Tile("padding avoided", f"{result.padding_share:.0%}", batch))
    if outcome.position.skipped:
        tiles.append(Tile("steps skipped", f"{outcome.position.skipped:,}", "loss or gradient not finite"))
    return tiles

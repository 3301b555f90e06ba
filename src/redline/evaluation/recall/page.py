"""An HTML page about the recall of a model, without scripts or external resources."""

from collections.abc import Sequence
from functools import partial

from redline.evaluation.recall.evaluate import LossRow, RecallRow
from redline.notation import format_bytes, format_seconds
from redline.pages import CURVE_COLORS, ChartCard, TextTable, render_page
from redline.pages.curves import Curve, draw_curves


def render_recall_page(name: str, about: str, rows: Sequence[RecallRow], losses: Sequence[LossRow]) -> str:
    """Renders the page; `about` is a line that says how the model ran."""
    tables = [_recall_table(rows)] if rows else []
    tables += [_loss_table(losses)] if losses else []
    return render_page(
        "redline.evaluation.recall",
        "page.html.jinja",
        name=name,
        meta=about,
        headline=headline(rows, losses),
        charts=[chart for chart in _charts(rows, losses) if chart.drawing],
        tables=tables,
    )


def headline(rows: Sequence[RecallRow], losses: Sequence[LossRow]) -> str:
    """Returns a sentence about the longest text."""
    if not rows:
        return (
            f"The loss changes from {losses[0].loss:.3f} to {losses[-1].loss:.3f} as the text grows." if losses else ""
        )
    longest = max(row.length for row in rows)
    words = ", ".join(f"{row.accuracy:.1%} of {row.task}" for row in rows if row.length == longest)
    held = max(row.state_bytes for row in rows if row.length == longest)
    return f"At {longest:,} tokens it recalls {words}, with a state of {format_bytes(held)}."


def _recall_table(rows: Sequence[RecallRow]) -> TextTable:
    columns = ("task", "tokens", "correct", "questions", "state", "time")
    cells = (
        (
            row.task,
            f"{row.length:,}",
            f"{row.accuracy:.1%}",
            f"{row.asked:,}",
            format_bytes(row.state_bytes),
            format_seconds(row.seconds),
        )
        for row in rows
    )
    return TextTable("Recall at each length", columns, tuple(cells))


def _loss_table(losses: Sequence[LossRow]) -> TextTable:
    rows = tuple((f"{row.first:,}–{row.last:,}", f"{row.loss:.4f}", f"{row.tokens:,}") for row in losses)
    return TextTable("Loss by position", ("tokens before", "loss", "tokens"), rows)


def _charts(rows: Sequence[RecallRow], losses: Sequence[LossRow]) -> list[ChartCard]:
    tasks = list(dict.fromkeys(row.task for row in rows))
    recalled = [
        Curve(task, tuple((row.length, row.accuracy) for row in rows if row.task == task), f"c{n % CURVE_COLORS}")
        for n, task in enumerate(tasks)
    ]
    legend = tuple((curve.kind, curve.name) for curve in recalled) if len(tasks) > 1 else ()
    state = Curve("state", tuple(sorted({(row.length, float(row.state_bytes)) for row in rows})))
    loss = Curve("loss", tuple((row.last, row.loss) for row in losses))
    draw = partial(draw_curves, along="tokens in the text", lengths=True)
    shares = draw("Recall", recalled, "recall", up="correct", span=(0.0, 1.0), write=lambda value: f"{value:.0%}")
    sizes = draw("State", [state], "state", up="bytes", doubling=True, write=format_bytes)
    nats = draw("Loss by position", [loss], "loss", up="loss", along="preceding tokens, up to")
    return [
        ChartCard("Recall", "Share of correct answers.", shares, legend),
        ChartCard("State", "Bytes that one sequence keeps between two tokens.", sizes),
        ChartCard("Loss by position", "Nats per token, by the number of preceding tokens.", nats),
    ]

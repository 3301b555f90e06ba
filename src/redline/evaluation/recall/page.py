"""An HTML page about the recall of a model, without scripts or external resources."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from redline.evaluation.recall.curves import KINDS, Axis, LengthCurve, draw
from redline.evaluation.recall.evaluate import LossRow, RecallRow
from redline.notation import format_bytes, format_seconds
from redline.version import VERSION


@dataclass(frozen=True)
class Subject:
    """The name of the model, and how it ran."""

    name: str
    about: str


def render_page(subject: Subject, rows: Sequence[RecallRow], losses: Sequence[LossRow] = ()) -> str:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(
        files("redline.evaluation.recall").joinpath("page.html.jinja").read_text("utf-8")
    )
    tasks = list(dict.fromkeys(row.task for row in rows))
    return template.render(
        version=VERSION,
        css=Markup(files("redline.ladder.report").joinpath("report.css").read_text("utf-8")),
        name=subject.name,
        meta=subject.about,
        headline=headline(rows, losses),
        charts=[chart for chart in _charts(rows, losses, tasks) if chart[2]],
        tasks=list(zip(tasks, [KINDS[n % len(KINDS)] for n in range(len(tasks))], strict=True)),
        recall=[
            (
                r.task,
                f"{r.length:,}",
                f"{r.accuracy:.1%}",
                f"{r.asked:,}",
                format_bytes(r.state_bytes),
                format_seconds(r.seconds),
            )
            for r in rows
        ],
        losses=[(f"{row.first:,}–{row.last:,}", f"{row.loss:.4f}", f"{row.tokens:,}") for row in losses],
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


def _charts(
    rows: Sequence[RecallRow], losses: Sequence[LossRow], tasks: Sequence[str]
) -> list[tuple[str, str, Markup]]:
    recalled = [
        LengthCurve(task, tuple((row.length, row.accuracy) for row in rows if row.task == task)) for task in tasks
    ]
    held = LengthCurve("held", tuple(sorted({(row.length, float(row.state_bytes)) for row in rows})))
    lost = LengthCurve("loss", tuple((row.last, row.loss) for row in losses))
    share = Axis("right", (0.0, 1.0), write=lambda value: f"{value:.0%}")
    sizes = Axis("bytes", doubling=True, write=format_bytes)
    length = "tokens of the text"
    return [
        ("Recall", "The share of correct answers.", draw("Recall", recalled, "recall", length, share)),
        ("State", "The size of the state or cache of one text.", draw("State", [held], "held", length, sizes)),
        (
            "Loss by position",
            "Nats per token, by the number of tokens before it.",
            draw("Loss by position", [lost], "loss", "tokens before, up to", Axis("loss")),
        ),
    ]

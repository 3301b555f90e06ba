"""The page of a load run: latency and throughput by level of load, and each level in detail."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from redline.notation import format_seconds
from redline.pages import CURVE_COLORS, ChartCard, TextTable, Tile, render_page
from redline.pages.curves import Curve, draw_curves
from redline.serving.load.outcome import Outcome, Status
from redline.serving.load.result import LoadResult
from redline.serving.load.summary import Level, Spread, percentile, running_over_time

Points = list[tuple[float, float]]
_LATENCIES = (
    ("TTFT", "ttft", "Time to first token: from the time at which the request was due."),
    ("ITL", "itl", "Time between two chunks of an answer."),
    ("E2E", "e2e", "From the time at which the request was due to the end of its answer."),
)
_PERCENTILES = tuple(step / 100 for step in range(0, 100, 2)) + (0.99, 1.0)


def render_load_page(result: LoadResult) -> str:
    levels = result.levels
    best = max(levels, key=lambda level: level.output_tokens_per_s)
    charts = [*(_by_load(levels) if len(levels) > 1 else ()), *_in_detail(levels, result.outcomes)]
    return render_page(
        "redline.serving.load",
        "page.html.jinja",
        heading=result.about["server"]["model"],
        meta=f"{result.about['server']['url']} · {result.about['prompts']}",
        headline=_headline(best),
        tiles=_tiles(best),
        charts=[chart for chart in charts if chart.drawing],
        tables=_tables(levels),
        facts=_facts(result.about),
    )


def _headline(best: Level) -> str:
    lost = [f"{count:,} {what}" for count, what in ((best.rejected, "rejected"), (best.failed, "failed")) if count]
    outcome = ", ".join(lost) if lost else "all answered"
    return (
        f"At {best.load}: {best.output_tokens_per_s:,.0f} output tokens/s, {best.requests:,} requests in "
        f"{format_seconds(best.duration_s)}, {outcome}."
    )


def _tiles(best: Level) -> list[Tile]:
    def spread(found: Spread | None) -> tuple[str, str]:
        if found is None:
            return "n/a", ""
        return format_seconds(found.p50_s), f"p95 {format_seconds(found.p95_s)}, p99 {format_seconds(found.p99_s)}"

    tiles = [
        Tile("Output tokens/s", f"{best.output_tokens_per_s:,.0f}", f"{best.total_tokens_per_s:,.0f} with prompts"),
        Tile("Requests/s", f"{best.requests_per_s:.3g}", f"{best.most_running:,} at a time at most"),
        Tile("TTFT p50", *spread(best.ttft)),
        Tile("ITL p50", *spread(best.itl)),
        Tile("E2E p50", *spread(best.e2e)),
        Tile("Cached", f"{best.cached_share:.0%}", "of the prompt tokens"),
    ]
    if best.goodput_per_s is not None:
        tiles.append(Tile("Goodput", f"{best.goodput_per_s:.3g}/s", f"{best.good:,} of {best.requests:,} requests"))
    return tiles


def _by_load(levels: Sequence[Level]) -> list[ChartCard]:
    along = "requests per second" if levels[0].load.rate is not None else "concurrent clients"
    lengths = all(level.load.amount.is_integer() for level in levels)

    def chart(title: str, note: str, curves: dict[str, Points], write: Callable[[float], str]) -> ChartCard:
        name = f"load-{title.split()[0].lower()}"
        return _card(title, note, name, curves, along, write, lengths)

    def over(value: Callable[[Level], float]) -> Points:
        return sorted((level.load.amount, value(level)) for level in levels)

    rates = {"answered": over(lambda level: level.requests_per_s)}
    if any(level.rejected for level in levels):
        rates["rejected"] = over(lambda level: level.rejected / level.duration_s)
    if all(level.goodput_per_s is not None for level in levels):
        rates["within the limits"] = over(lambda level: level.goodput_per_s or 0.0)
    tokens = {"output": over(lambda level: level.output_tokens_per_s)}
    charts = [
        chart("Tokens per second", "Output tokens, by load.", tokens, _write_count),
        chart("Requests per second", "By load.", rates, lambda value: f"{value:.3g}"),
    ]
    for title, name, note in _LATENCIES:
        curves: dict[str, Points] = {}
        for point in ("p50", "p95", "p99"):
            found = [(level.load.amount, getattr(level, name)) for level in levels]
            curves[point] = sorted((at, getattr(spread, f"{point}_s")) for at, spread in found if spread is not None)
        charts.append(chart(f"{title} by load", note, curves, format_seconds))
    return charts


def _in_detail(levels: Sequence[Level], outcomes: Sequence[Sequence[Outcome]]) -> list[ChartCard]:
    # If there are more levels than colors, shows evenly spaced levels, including the first and the last.
    count = min(len(levels), CURVE_COLORS)
    chosen = [round(place * (len(levels) - 1) / max(1, count - 1)) for place in range(count)]

    def each(points: Callable[[Sequence[Outcome]], Points]) -> dict[str, Points]:
        return {str(levels[place].load): points(outcomes[place]) for place in chosen}

    def ttfts(found: Sequence[Outcome]) -> Points:
        return _percentile_points([outcome.ttft_s for outcome in _done(found)])

    def gaps(found: Sequence[Outcome]) -> Points:
        return _percentile_points([gap_s for outcome in _done(found) for gap_s in outcome.gaps_s])

    share, seconds = "percentile", "seconds"
    notes = ("Of complete answers.", "Sent and not yet ended.", "Of complete answers, by second.")
    return [
        _card("TTFT by percentile", notes[0], "ttft-percentile", each(ttfts), share, format_seconds),
        _card("ITL by percentile", notes[0], "itl-percentile", each(gaps), share, format_seconds),
        _card("Requests running", notes[1], "running", each(_running), seconds, _write_count),
        _card("Tokens per second over time", notes[2], "token-rate", each(_token_rate), seconds, _write_count),
    ]


def _card(
    title: str,
    note: str,
    name: str,
    curves: dict[str, Points],
    along: str,
    write: Callable[[float], str],
    lengths: bool = False,
) -> ChartCard:
    drawn = [
        Curve(key, tuple(points), f"c{place % CURVE_COLORS}") for place, (key, points) in enumerate(curves.items())
    ]
    legend = tuple((curve.kind, curve.name) for curve in drawn) if len(drawn) > 1 else ()
    drawing = draw_curves(title, drawn, name, along, write, (0.0, None), lengths=lengths)
    return ChartCard(title, note, drawing, legend)


def _done(outcomes: Sequence[Outcome]) -> list[Outcome]:
    return [outcome for outcome in outcomes if outcome.status is Status.DONE]


def _percentile_points(values: Sequence[float | None]) -> Points:
    ordered = sorted(value for value in values if value is not None)
    return [(100 * share, percentile(ordered, share)) for share in _PERCENTILES] if ordered else []


def _running(outcomes: Sequence[Outcome]) -> Points:
    began_s = min(outcome.due_s for outcome in outcomes)
    return [(at_s - began_s, float(running)) for at_s, running in running_over_time(outcomes)]


def _token_rate(outcomes: Sequence[Outcome]) -> Points:
    """Returns the tokens of each whole second; an answer's tokens are spread evenly over its chunks."""
    began_s = min(outcome.due_s for outcome in outcomes)
    last_s = max(outcome.ended_s for outcome in outcomes)
    seconds = [0.0] * int(last_s - began_s)
    for outcome in _done(outcomes):
        if outcome.first_s is None or not outcome.output_tokens:
            continue
        for at_s in accumulate(outcome.gaps_s, initial=outcome.first_s):
            second = int(at_s - began_s)
            if second < len(seconds):
                seconds[second] += outcome.output_tokens / outcome.chunks
    return [(second + 0.5, rate) for second, rate in enumerate(seconds)]


def _tables(levels: Sequence[Level]) -> list[tuple[TextTable, str]]:
    counts = (
        "load",
        "requests",
        "done",
        "rejected",
        "failed",
        "left",
        "tokens/s",
        "tokens/chunk",
        "cached",
        "late p99",
    )
    rows = tuple(
        (
            str(level.load),
            *(f"{count:,}" for count in (level.requests, level.done, level.rejected, level.failed, level.abandoned)),
            f"{level.output_tokens_per_s:,.0f}",
            f"{level.tokens_per_chunk:.2f}",
            f"{level.cached_share:.0%}",
            format_seconds(level.late.p99_s) if level.late else "",
        )
        for level in levels
    )
    note = "late: how long after its time the client sent a request; large values mean that the client was too slow."
    tables = [(TextTable("Requests", counts, rows), note)]
    columns = ("load", "latency", "p50", "p95", "p99", "mean", "max")
    latencies = tuple(
        (str(level.load), title, *(format_seconds(getattr(spread, name)) for name in _SPREAD))
        for level in levels
        for title, key in (("TTFT", "ttft"), ("ITL", "itl"), ("time/token", "tpot"), ("E2E", "e2e"))
        if (spread := getattr(level, key)) is not None
    )
    tables.append((TextTable("Latencies", columns, latencies, words=2), "Of complete answers."))
    errors = tuple((str(level.load), error, f"{count:,}") for level in levels for error, count in level.errors.items())
    if errors:
        tables.append((TextTable("Errors", ("load", "error", "requests"), errors, words=2), "The most frequent ones."))
    return tables


_SPREAD = ("p50_s", "p95_s", "p99_s", "mean_s", "most_s")


def _facts(about: dict[str, Any]) -> list[tuple[str, str]]:
    machine, versions = about["machine"], about["versions"]
    server = about["server"]
    facts = [("Server", server["url"]), ("Model", server["model"])]
    if server.get("version"):
        found = server["version"]
        facts.append(("Server version", str(found.get("version", found) if isinstance(found, dict) else found)))
    facts += [("Prompts", about["prompts"])]
    facts += [("Limits", about["limits"])] if about.get("limits") else []
    facts += [("Client", f"{machine['cpu']}, {machine['cores']} cores, {machine['system']}")]
    facts += [("GPUs of the client's machine", "; ".join(machine["gpus"]))] if machine["gpus"] else []
    facts += [("Versions", ", ".join(f"{name} {version}" for name, version in versions.items()))]
    return [*facts, ("Command", about["command"])]


def _write_count(value: float) -> str:
    return f"{value:,.0f}"

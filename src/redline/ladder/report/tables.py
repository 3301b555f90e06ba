"""The tables of a report as text, for HTML and Markdown."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from redline.ladder.gate import Score
from redline.ladder.measurement import Measurement
from redline.ladder.report.climb import UNTRIED, Climb, Entry, format_change, format_ratio, interleaved_eager_s
from redline.ladder.report.ladder import (
    Row,
    rung_names,
    score_name,
    score_text,
    shapes_sentence,
    speedup,
    time_name,
    worst_score,
)
from redline.ladder.report.roofline import place
from redline.ladder.statistics import Interval
from redline.notation import format_bytes, format_rate, format_seconds

NONE = "–"
_KINDS = {"median": "Medians", "p99": "99th percentiles of the calls"}


@dataclass(frozen=True)
class Table:
    """A table of text cells. A second line in a cell is shown in small print; `why` has a sentence for each row."""

    name: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    why: tuple[str, ...] = ()
    note: str = ""
    # The number of leading text columns; the others are numeric.
    words: int = 1


def all_tables(climb: Climb) -> list[Table]:
    """Returns all tables that are not empty, in the order of the page."""
    makers = (
        front_table,
        ladder_table,
        rejected_table,
        shapes_table,
        _sizes,
        ablation_table,
        _proof,
        _gates,
        _memory,
        _setup,
        _environment,
    )
    return [table for make in makers if (table := make(climb)) is not None and table.rows]


def ladder_table(climb: Climb) -> Table:
    removed = {e.row.rung.partition("(")[0] for e in climb.ablations if e.row.verdict == "dropped"}
    entries = [e for e in climb.entries if e.row.role != "ablation" and e.row.verdict not in UNTRIED]
    rows, why = [], []
    requests = bool(climb.subject.callers)
    time_title = "Requests per second" if requests else time_name(climb.subject)
    for entry in entries:
        row = entry.row
        again = " (again)" if row.role == "second look" else ""
        cells = {
            "Rung": entry.label + again,
            "Verdict": row.verdict,
            time_title: _rate(row) if requests else _or_none(row.time_s, format_seconds) + _span(row.low_s, row.high_s),
            "Calls": _or_none(row.calls, "{:,}".format),
            "Last plan": _or_none(row.against_s, _format_rate if requests else format_seconds),
            "Over last": NONE if row.role == "baseline" else _ratio(row.over_last),
            "Over start": _or_none(row.over_start, format_ratio),
            "Peak memory": _or_none(row.peak_bytes, format_bytes),
            "Quality": _quality(entry.measurement.scores),
            "Of the roofline": _or_none(row.share, "{:.0%}".format),
            "Set-up": _setup_time(entry),
            "Break-even": _calls(row.break_even),
        }
        rows.append(cells)
        later = row.verdict == "kept" and row.role != "final" and not removed.isdisjoint(rung_names(row.rung))
        why.append(row.reason + ("; removed later by the ablation" if later else ""))
    hidden = sum(e.row.verdict in UNTRIED for e in climb.tried)
    note = (
        f"{_KINDS[climb.subject.statistic]} with 99% intervals. Last plan: the {climb.subject.statistic} of the plan "
        "measured alternately with this one; over last: the speed-up over that plan. Over start: the speed-up over the "
        "original model. Break-even: the calls after which the set-up has paid off. No speed is shown if a gate fails."
    )
    if requests:
        note += f" Requests are made by {climb.subject.callers} concurrent callers."
    if shapes := shapes_sentence(climb.subject):
        note += f" {shapes}"
    if any(e.row.setup_cached for e in entries):
        note += " * This set-up used a compiler cache and takes longer on first use."
    if hidden:
        note += f" {hidden} more were not tried; the next table gives the reasons."
    cells = tuple(tuple(row.values()) for row in rows)
    return Table("ladder", "The ladder", tuple(rows[0]) if rows else (), cells, tuple(why), note, words=2)


def front_table(climb: Climb) -> Table:
    rows = tuple(
        (
            point.plan,
            f"{point.number} {point.name}" + (", the answer" if point.is_answer else ""),
            _ratio(point.speed) if point.plan != "eager" else format_ratio(1.0),
            format_bytes(point.peak_bytes),
            point.quality,
        )
        for point in climb.front
    )
    note = (
        "The plans that no other plan beats in speed, peak memory and quality together, beyond the noise. Quality is "
        "the score closest to the limit of its gate. The output folder has a plan file for each, in front/."
    )
    columns = ("Plan", "Best at", "Over start", "Peak memory", "Quality")
    return Table("front", "The Pareto front of speed, memory and quality", columns, rows, note=note, words=2)


def rejected_table(climb: Climb) -> Table:
    """Returns the table of the rungs that were not kept.

    Rungs that never ran share a row if their reasons are the same except for numbers, such as seconds or bytes.
    """
    groups: dict[tuple[str, str], list[Entry]] = {}
    for number, entry in enumerate(climb.rejected):
        alike = re.sub(r"[\d.,]+", "", entry.row.reason) if entry.row.verdict in UNTRIED else str(number)
        groups.setdefault((_verdict(entry), alike), []).append(entry)
    rows = []
    for (verdict, _), entries in groups.items():
        names = ", ".join(dict.fromkeys(entry.row.rung or entry.label for entry in entries))
        differ = len({entry.row.reason for entry in entries}) > 1
        reason = f"the first: {entries[0].row.reason}; the others alike" if differ else entries[0].row.reason or NONE
        rows.append((names, verdict, reason))
    return Table("rejected", "Rungs not kept, and why", ("Rungs", "Verdict", "Reason"), tuple(rows), words=3)


def ablation_table(climb: Climb) -> Table:
    rows = tuple(
        (e.row.rung, _verdict(e), _ratio(e.slowdown_without), _or_none(e.row.peak_bytes, format_bytes))
        for e in climb.ablations
    )
    why = tuple(e.row.reason for e in climb.ablations)
    columns = ("Rung", "Verdict", "Slower without it", "Peak memory without it")
    return Table("ablation", "What each rung is worth in the final plan", columns, rows, why, words=2)


def _verdict(entry: Entry) -> str:
    return "removed" if entry.row.role == "ablation" and entry.row.verdict == "dropped" else entry.row.verdict


def _proof(climb: Climb) -> Table:
    proofs = climb.result.measurement.proof if climb.result else {}
    rows = tuple((rung, proof or NONE) for rung, proof in proofs.items())
    return Table("proof", "Proof that each rung took effect", ("Rung", "Proof"), rows, words=2)


def _gates(climb: Climb) -> Table:
    scores = climb.result.measurement.scores if climb.result else ()
    rows = tuple((score_name(s), "passed" if s.passed else "failed", score_text(s)) for s in scores)
    return Table("gates", "The gates of the final plan", ("Gate", "Verdict", "Score and limit"), rows, words=3)


def _memory(climb: Climb) -> Table:
    base = climb.baseline.row.peak_bytes if climb.baseline else None
    rows = []
    for entry in climb.milestones:
        peak, weights = entry.row.peak_bytes, entry.measurement.weight_bytes
        if peak:
            change = format_change(peak / base) if base and entry is not climb.baseline else NONE
            rows.append((entry.label, format_bytes(peak), change, format_bytes(weights) if weights else NONE))
    return Table("memory", "Memory", ("Plan", "Peak", "Over start", "Weights"), tuple(rows))


def _setup(climb: Climb) -> Table:
    base = climb.baseline.row.time_s if climb.baseline else None
    rows, cached = [], False
    for entry in climb.milestones:
        if entry.row.setup_s is None:
            continue
        start = entry.row.over_start
        saved = base * (1 - 1 / start) if base and start and entry is not climb.baseline else None
        cached |= entry.row.setup_cached
        rows.append((entry.label, _setup_time(entry), _or_none(saved, format_seconds), _calls(entry.row.break_even)))
    note = "* This set-up used a compiler cache and takes longer on first use." if cached else ""
    columns = ("Plan", "Set-up", "Saved per call", "Break-even")
    return Table("setup", "Set-up and break-even", columns, tuple(rows), note=note)


def shapes_table(climb: Climb) -> Table | None:
    result = climb.result
    if result is None or not result.timed or len(result.measurement.shapes) < 2:
        return None
    m = result.measurement
    rows = []
    for shape in m.shapes:
        before = interleaved_eager_s(climb, shape)
        compiled = climb.compiled.measurement.time_s(shape) if climb.compiled else float("nan")
        after, roofline = m.time_s(shape), place(m, shape)
        rows.append(
            (
                shape or "as given",
                _or_none(before, format_seconds),
                format_seconds(compiled),
                format_seconds(after),
                format_ratio(before / after) if before is not None else NONE,
                f"{format_count(m.throughput(shape))} {m.unit}s/s",
                f"{roofline.share:.0%}" if roofline else NONE,
                _or_none(m.setup_s.get(shape), format_seconds),
            )
        )
    columns = ("Shape", "Eager", "torch.compile", "Final plan", "Faster", "Rate", "Of the roofline", "Set-up")
    return Table("shapes", "By input shape", columns, tuple(rows))


def _sizes(climb: Climb) -> Table | None:
    found = climb.result.measurement if climb.result is not None else None
    if found is None or not found.ranges:
        return None
    rows = tuple(
        (
            size.shape,
            f"{size.event} ({size.reason})" if size.reason else size.event,
            format_seconds(size.first_s) if size.first_s else NONE,
            format_seconds(size.step_s) if size.step_s else NONE,
        )
        for sizes in found.ranges.values()
        for size in sizes
    )
    note = ". ".join(found.range_sentences) + ". Both times are those of a single call."
    return Table(
        "sizes", "Over the range of shapes", ("Shape", "Event", "First call", "Later"), rows, note=note, words=2
    )


def _environment(climb: Climb) -> Table:
    m, machine = climb.subject, climb.machine
    device = machine.name + (f", {format_bytes(machine.device_bytes)}" if machine.device_bytes else "")
    host_memory = format_bytes(machine.host_bytes) if machine.host_bytes else "memory unknown"
    copy = machine.copy_bytes_per_s
    matmul = (f"{dtype} {format_rate(rate, 'FLOP/s')}" for dtype, rate in machine.matmul_flops_per_s.items())
    rows = (
        ("Workload", m.workload),
        ("Objective", _objective(m)),
        ("Device", f"{device} ({machine.device})"),
        ("Host", f"{machine.system}, {machine.cores} cores, {host_memory}"),
        ("Copy ceiling", format_rate(copy, "B/s") if copy > 0 else ""),
        ("Matmul ceilings", ", ".join(matmul)),
        ("Driver, CUDA", ", ".join(filter(None, (machine.driver, machine.cuda)))),
        ("Python", machine.python),
        ("Libraries", ", ".join(f"{name} {version}" for name, version in machine.versions.items())),
        ("Redline", m.redline),
        ("Command", m.command),
        ("Options", _options(m.options)),
        ("Run", m.run),
        ("Measured", format_date(m.created)),
        ("Notes", "; ".join(dict.fromkeys(note for e in climb.entries for note in e.measurement.notes))),
    )
    return Table("environment", "The environment", ("Property", "Value"), tuple(r for r in rows if r[1]), words=2)


def _objective(m: Measurement) -> str:
    limit = f", within --max-memory {format_bytes(m.max_bytes)}" if m.max_bytes else ""
    callers = f" of {m.callers} concurrent callers" if m.callers else ""
    return f"{m.objective}{callers}{', of a training step' if m.training else ''}{limit}"


def format_count(number: float) -> str:
    if number != number:
        return NONE
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def format_date(created: float) -> str:
    return datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%d %H:%M UTC")


def final_over_start(climb: Climb) -> Interval | None:
    """Returns the speed-up of the final plan over the baseline from interleaved samples."""
    if climb.final is None or climb.baseline is None or climb.final.measurement.against != climb.baseline.row.plan:
        return None
    return speedup(climb.final.measurement)


def _options(options: Mapping[str, Any]) -> str:
    """Formats options as `size=64`; omits options that differ between shapes, because the labels contain them."""
    return ", ".join(f"{key}={value}" for key, value in options.items() if not isinstance(value, Mapping))


def _or_none(value: Any, form: Callable[[Any], str]) -> str:
    return NONE if value is None else form(value)


def _span(low: float | None, high: float | None) -> str:
    """Returns an interval as the second line of a cell: `14.1–14.2`; omits the unit if both ends have the same unit."""
    if low is None or high is None:
        return ""
    first, last = format_seconds(low), format_seconds(high)
    same = first.split()[-1] == last.split()[-1]
    return f"\n{first.split()[0]}–{last.split()[0]}" if same else f"\n{first} – {last}"


def _rate(row: Row) -> str:
    """Returns the requests per second with their interval as a second line."""
    if row.requests_per_s is None:
        return NONE
    bounds = f"\n{_format_rate(row.high_s)}–{_format_rate(row.low_s)}" if row.low_s and row.high_s else ""
    return format_count(row.requests_per_s) + bounds


def _format_rate(seconds: float) -> str:
    return format_count(1 / seconds)


def _ratio(interval: Interval | None) -> str:
    """Returns `1.49×` with `1.47–1.51` as its second line; a single sample has no interval."""
    if interval is None:
        return NONE
    bounds = "" if interval.low <= 0 else f"\n{interval.low:.2f}–{interval.high:.2f}"
    return format_ratio(interval.middle) + bounds


def _quality(scores: Sequence[Score]) -> str:
    worst = worst_score(scores)
    if worst is None:
        return NONE
    value, *limit = score_text(worst).split()
    return f"{value}\n{' '.join([score_name(worst), *limit])}"


def _setup_time(entry: Entry) -> str:
    mark = " *" if entry.row.setup_cached else ""
    return _or_none(entry.row.setup_s, lambda seconds: format_seconds(seconds) + mark)


def _calls(calls: float | None) -> str:
    if calls is None:
        return NONE
    return "immediately" if calls < 1 else f"{calls:,.0f} calls" if calls < 1e6 else f"{calls:.2g} calls"


def columns_with_values(table: Table) -> Sequence[int]:
    """Returns the columns that are not empty in at least one row."""
    return [i for i in range(len(table.columns)) if any(row[i] != NONE for row in table.rows)]

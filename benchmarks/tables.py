"""Writes the README's table and image of results, and docs/results.md, from the committed measurement files.

    python benchmarks/tables.py            writes them
    python benchmarks/tables.py --check    exits with 1 if one of them is stale, and writes nothing

A result file is the measurements.jsonl of a climb, committed as benchmarks/results/MACHINE/WORKLOAD.jsonl, or the
measurements of a `redline bench`, which only docs/results.md shows. The last run in a file counts. Every figure is
computed from the raw samples of the final race, in which eager, the best torch.compile, eager bf16 and the climbed plan
take turns. `full_tables.py` writes the ladders rung by rung.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from redline.errors import RedlineError
from redline.files.atomic import write_text
from redline.ladder.measurement import Measurement, load_measurements
from redline.ladder.plan import brief
from redline.ladder.report import Climb, choose_run, climb_svg
from redline.ladder.report.ladder import format_score, timed, worst_score
from redline.ladder.report.markdown import escape, fenced, markdown_table
from redline.ladder.report.tables import all_tables, format_date
from redline.ladder.statistics import Interval, ratio_interval
from redline.notation import format_bytes, format_seconds

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path("benchmarks/results")
README = Path("README.md")
PAGE = Path("docs/results.md")
PICTURE = Path("docs/images/ladder.svg")
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
WRITTEN = "<!-- Written by benchmarks/tables.py from benchmarks/results: add a result file there and run it. -->"
NO_RESULTS = "No results yet."
NONE = "–"
# The climbs that the README shows: a vision transformer and a CNN on a CPU, and three kinds of model on a GPU.
ON_FRONT_PAGE = (
    RESULTS / "h200/drct_l.jsonl",
    RESULTS / "h200/llama.jsonl",
    RESULTS / "h200/unet_880m.jsonl",
    RESULTS / "xeon-amx/resnet.jsonl",
    RESULTS / "xeon-amx/vit.jsonl",
)
# The tables of a climb's report that `full_page` shows.
FULL_TABLES = ("ladder", "rejected", "shapes", "ablation", "proof", "gates")


@dataclass(frozen=True)
class Result:
    """The last climb in a result file."""

    path: Path  # relative to the repository's root
    climb: Climb
    # The rows of the final race by plan, with the winner.
    race: dict[str, Measurement]
    winner: Measurement

    @classmethod
    def load(cls, path: Path, root: Path) -> "Result":
        climb = Climb.of(choose_run(load_measurements(root / path)))
        rows = [entry.measurement for entry in climb.entries if entry.row.role == "final"]
        if not rows or rows[-1].verdict != "kept":
            raise RedlineError(f"{path} does not end with the final race of a climb: let it finish, then commit it.")
        return cls(path, climb, {row.plan: row for row in rows if timed(row)}, rows[-1])

    @property
    def machine(self) -> str:
        return str(self.winner.machine.get("name", "unknown machine"))

    @property
    def name(self) -> str:
        """The name of a bundled workload, or the function of a workload in a file."""
        return self.winner.workload.rpartition(":")[2]

    @property
    def eager(self) -> Measurement | None:
        return self.race.get("eager")

    @property
    def compiled(self) -> Measurement | None:
        """The row of torch.compile on the unmodified model in the final race."""
        rivals = [self.race[entry.row.plan] for entry in self.climb.compiles if entry.row.plan in self.race]
        return min(rivals, key=lambda row: row.median_s(), default=None)

    @property
    def bf16(self) -> Measurement | None:
        alone = [row for plan, row in self.race.items() if plan.partition("(")[0] == "bf16" and " + " not in plan]
        return alone[0] if alone else None

    def over(self, rival: Measurement | None) -> Interval | None:
        """Returns the speedup of the winner over a row of the final race."""
        if rival is None or rival is self.winner or not timed(self.winner):
            return None
        shapes = [shape for shape in self.winner.shapes if rival.samples.get(shape)]
        return ratio_interval([(rival.samples[s], self.winner.samples[s]) for s in shapes]) if shapes else None


def find_results(root: Path) -> list[Result]:
    """Returns the climbs, sorted by machine and workload."""
    paths = sorted(path.relative_to(root) for path in (root / RESULTS).glob("*/*.jsonl"))
    found = [Result.load(path, root) for path in paths if _is_climb(root / path)]
    return sorted(found, key=lambda result: (result.machine, result.name, str(result.path)))


def _is_climb(path: Path) -> bool:
    """Returns whether a result file is a climb; files of other benchmarks have no ladder."""
    return any(row.role == "baseline" for row in load_measurements(path))


def find_benches(root: Path) -> list[tuple[Path, list[Measurement]]]:
    """Returns the rows of `redline bench` by file."""
    paths = sorted(path.relative_to(root) for path in (root / RESULTS).glob("*/*.jsonl"))
    return [(path, load_measurements(root / path)) for path in paths if not _is_climb(root / path)]


def _bench_section(path: Path, rows: Sequence[Measurement]) -> list[str]:
    link = Path(os.path.relpath(path, PAGE.parent)).as_posix()
    lines = [_line(("workload", "plan", "median", "99% interval", "× eager", "peak memory", "closest gate"))]
    lines.append(_line(["---"] * 7))
    for row in rows:
        eager = next((r for r in rows if r.plan == "eager" and r.workload == row.workload and timed(r)), None)
        if not timed(row):
            why = escape(f"{row.verdict}: {row.reason}")
            lines.append(_line([escape(row.workload), f"`{brief(row.plan)}`", why, *[NONE] * 4]))
            continue
        interval, worst = row.interval_s(), worst_score(row.scores)
        ratio = ratio_interval([(eager.samples[s], row.samples[s]) for s in row.shapes]) if eager else None
        lines.append(
            _line(
                [
                    escape(row.workload),
                    f"`{brief(row.plan)}`",
                    f"**{format_seconds(interval.middle)}**",
                    _between(interval),
                    _ratio(ratio),
                    format_bytes(row.peak_bytes),
                    escape(format_score(worst)) if worst is not None else NONE,
                ]
            )
        )
    head = f"[{path.name}]({link}) · {rows[-1].machine.get('name')} · {format_date(rows[-1].created)} · "
    return [f"### {path.stem}", head + _environment(rows[-1]), fenced(rows[-1].command, "sh"), "\n".join(lines)]


def front_page(results: Sequence[Result]) -> list[Result]:
    return [result for path in ON_FRONT_PAGE for result in results if result.path == path] or list(results)[:5]


def readme_table(results: Sequence[Result]) -> str:
    """Returns the table of the front page, with five columns that fit a narrow screen."""
    shown = front_page(results)
    if not shown:
        return NO_RESULTS
    columns = ("model", "machine", "eager", "best `torch.compile`", "Redline", "× eager", "plan")
    lines = [_line(columns), _line(["---"] * len(columns))]
    for result in shown:
        link = f"[{escape(result.name)}]({result.path.as_posix()})"
        times = (_time(result.eager), _time(result.compiled), f"**{_time(result.winner)}**")
        plan = f"`{result.winner.plan}`".replace("|", "\\|")
        lines.append(_line((link, escape(result.machine), *times, _ratio(result.over(result.eager)), plan)))
    return "\n".join(lines)


def climb_table(results: Sequence[Result]) -> str:
    if not results:
        return NO_RESULTS
    columns = (
        "workload", "machine", "eager", "best `torch.compile`", "eager bf16", "the plan that Redline found", "Redline",
        "× eager", "× `torch.compile`", "peak memory", "closest gate",
    )  # fmt: skip
    lines = [_line(columns), _line(["---"] * len(columns))]
    return "\n".join([*lines, *(_line(_cells(result)) for result in results)])


def _cells(result: Result) -> list[str]:
    link = f"[{escape(result.name)}]({Path(os.path.relpath(result.path, PAGE.parent)).as_posix()})"
    winner, compiled = result.winner, result.compiled
    mode = f" ({_mode(compiled.plan)})" if compiled is not None else ""
    worst = worst_score(winner.scores)
    return [
        link,
        escape(result.machine),
        _time(result.eager),
        f"{_time(compiled)}{mode}",
        _time(result.bf16),
        f"`{winner.plan}`".replace("|", "\\|"),
        f"**{_time(winner)}**",
        _ratio(result.over(result.eager)),
        "the same plan" if compiled is winner else _ratio(result.over(compiled)),
        _memory(result.eager, winner),
        escape(format_score(worst)) if worst is not None else NONE,
    ]


def _time(row: Measurement | None) -> str:
    """Formats the median time, by shape if there are several."""
    if row is None or not timed(row):
        return NONE
    times = [(shape, format_seconds(row.median_s(shape))) for shape in row.shapes]
    return times[0][1] if len(times) == 1 else "<br>".join(f"{escape(shape)}: {time}" for shape, time in times)


def _mode(plan: str) -> str:
    """Returns `max-autotune` for `compile(mode=max-autotune)`."""
    options = plan.removeprefix("compile").strip("()").split(", ")
    modes = [option.removeprefix("mode=") for option in options if option.startswith("mode=")]
    return modes[0] if modes else "default"


def _between(interval: Interval) -> str:
    """Formats an interval; a single run has none."""
    if interval.low < 0:
        return "one run"
    return f"{format_seconds(interval.low)} – {format_seconds(interval.high)}"


def _ratio(interval: Interval | None) -> str:
    """Formats a ratio with its 99% interval; a single turn has none."""
    if interval is None:
        return NONE
    return str(interval) if interval.low > 0 else f"{interval.middle:.2f}×"


def _memory(eager: Measurement | None, winner: Measurement) -> str:
    before = format_bytes(eager.peak_bytes) if eager is not None and eager.peak_bytes else NONE
    return f"{before} → {format_bytes(winner.peak_bytes) if winner.peak_bytes else NONE}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def results_page(results: Sequence[Result], benches: Sequence[tuple[Path, list[Measurement]]] = ()) -> str:
    """Returns docs/results.md: one row per climb, and the plans that `redline bench` compared."""
    parts = [
        "# Results",
        WRITTEN,
        "Every climb whose measurements are in this repository. Times are medians of the final race, in which eager, "
        "the best `torch.compile`, eager bf16 and the plan that Redline found take turns in one run; ratios have 99% "
        "intervals. `redline report FILE` turns a file into the whole page, with every rung, its reason and its plots; "
        "`make tables` writes all of them as HTML.",
        climb_table(results),
    ]
    if benches:
        parts.append("## Plans compared with `redline bench`")
    for path, rows in benches:
        parts += _bench_section(path, rows)
    return "\n\n".join(parts) + "\n"


def full_page(results: Sequence[Result]) -> str:
    """Returns every climb rung by rung, as Markdown."""
    parts = ["# Climbs, rung by rung"]
    machine = ""
    for result in results:
        if result.machine != machine:
            machine = result.machine
            parts.append(f"## {escape(machine)}")
        parts += _section(result)
    return "\n\n".join(parts) + "\n"


def _section(result: Result) -> list[str]:
    row, link = result.winner, os.path.relpath(result.path, PAGE.parent)
    parts = [
        f"### {escape(result.name)}",
        f"**{escape(result.climb.headline())}**",
        f"[{result.path.name}]({Path(link).as_posix()}) · {format_date(row.created)} · {_environment(row)}",
        fenced(row.command, "sh"),
        fenced(row.plan),
    ]
    for table in all_tables(result.climb):
        if table.name in FULL_TABLES:
            parts += [f"#### {escape(table.title)}", markdown_table(table)]
    return parts


def _environment(row: Measurement) -> str:
    machine = row.machine
    parts = [f"Redline {row.redline}", f"Python {machine.get('python', '?')}"]
    parts += [f"{name} {version}" for name, version in (machine.get("versions") or {}).items()]
    parts += [f"CUDA {machine['cuda']}"] if machine.get("cuda") else []
    parts += [f"driver {machine['driver']}"] if machine.get("driver") else []
    parts += [f"{machine.get('cores', '?')} cores", str(machine.get("system", ""))]
    return escape(", ".join(part for part in parts if part))


def with_table(readme: str, table: str) -> str:
    """Returns the README with the text between its markers replaced."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in after or END in after:
        raise RedlineError(f"{README} must contain {BEGIN} and, after it, {END}, once each.")
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{after}"


def render(root: Path) -> dict[Path, str]:
    """Returns the text of every generated file."""
    results = find_results(root)
    readme = root / README
    if not readme.is_file():
        raise RedlineError(f"there is no {README} to write the table into.")
    files = {
        README: with_table(readme.read_text(encoding="utf-8"), readme_table(results)),
        PAGE: results_page(results, find_benches(root)),
    }
    if results:
        files[PICTURE] = climb_svg(front_page(results)[0].climb)
    return files


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description="Writes the README's results and docs/results.md.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a file is stale")
    check = parser.parse_args(arguments).check
    try:
        files = render(root)
    except RedlineError as error:
        print(f"tables: {error}", file=sys.stderr)
        return 2
    stale = [p for p, text in files.items() if not (root / p).is_file() or (root / p).read_text("utf-8") != text]
    for path in stale:
        if check:
            print(f"{path} is stale: run `python benchmarks/tables.py`.", file=sys.stderr)
        else:
            write_text(root / path, files[path])
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())

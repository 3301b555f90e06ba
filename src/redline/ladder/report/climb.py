"""The measurements of a climb, sorted into its parts: baseline, trials, ablations and final plan; and a headline."""

from collections.abc import Sequence
from dataclasses import dataclass

from redline.errors import MeasurementError
from redline.ladder.measurement import Measurement
from redline.ladder.report.front import Point, pareto_front
from redline.ladder.report.ladder import Row, ladder_rows, rung_names, timed
from redline.ladder.report.roofline import RecordedMachine
from redline.ladder.statistics import Interval, ratio_interval

# Differences below this share are not mentioned in the headline.
_SAME = 0.02
_FASTER = ("as fast as", "faster than", "slower than")
_MORE_REQUESTS = ("as many requests as", "more requests per second than", "fewer requests per second than")
# Roles of rungs that were tried.
TRIED = ("opening", "trial", "second look")
# Verdicts of rungs that did not run.
UNTRIED = ("unavailable", "unmeasured")
# The CSS color class of each role; the class of a trial depends on its verdict.
KINDS = {"baseline": "base", "compile": "compiled", "final": "final"}


@dataclass(frozen=True)
class Entry:
    """A measurement with its table row and its label."""

    measurement: Measurement
    row: Row
    label: str

    @property
    def timed(self) -> bool:
        return timed(self.measurement)

    @property
    def slowdown_without(self) -> Interval | None:
        """For an ablation: how many times slower a step is without this rung."""
        last = self.row.over_last
        if last is None or last.middle <= 0:
            return None
        if last.low <= 0:
            return Interval(1 / last.middle, 0.0, float("inf"))
        return Interval(1 / last.middle, 1 / last.high, 1 / last.low)


@dataclass(frozen=True)
class Climb:
    """One run of a measurement file, sorted into its parts."""

    entries: tuple[Entry, ...]
    baseline: Entry | None
    compiles: tuple[Entry, ...]
    compiled: Entry | None  # the fastest of `compiles`
    tried: tuple[Entry, ...]
    ablations: tuple[Entry, ...]
    final: Entry | None
    over_compiled: float | None

    @classmethod
    def of(cls, measurements: Sequence[Measurement]) -> "Climb":
        if not measurements:
            raise MeasurementError("the file contains no measurements to report.")
        rows = ladder_rows(measurements)
        final_at = find_final(rows)
        entries = tuple(
            Entry(m, row, row_label(row, index == final_at))
            for index, (m, row) in enumerate(zip(measurements, rows, strict=True))
        )
        compiles = tuple(e for e in entries if e.row.role == "compile" or _is_plain_compile(e))
        usable = [e for e in compiles if e.row.over_start is not None]
        compiled = max(usable, key=lambda e: e.row.over_start or 0.0, default=None)
        final = None if final_at is None else entries[final_at]
        return cls(
            entries=entries,
            baseline=next((e for e in entries if e.row.role == "baseline"), None),
            compiles=compiles,
            compiled=compiled,
            tried=tuple(e for e in entries if e.row.role in TRIED),
            ablations=tuple(e for e in entries if e.row.role == "ablation"),
            final=final,
            over_compiled=_over_compiled(entries, final, compiled),
        )

    @property
    def kept(self) -> tuple[Entry, ...]:
        return tuple(e for e in self.tried if e.row.verdict == "kept")

    @property
    def rejected(self) -> tuple[Entry, ...]:
        """Rungs that were tried and not kept, or removed by an ablation."""
        dropped = [e for e in self.ablations if e.row.verdict == "dropped"]
        return tuple(e for e in self.tried if e.row.verdict != "kept") + tuple(dropped)

    @property
    def result(self) -> Entry | None:
        """The final plan, or the last kept rung of an interrupted climb."""
        kept = [e for e in self.kept if e.timed]
        return self.final or (kept[-1] if kept else None)

    @property
    def subject(self) -> Measurement:
        """The measurement from which a report takes the workload and the machine of the climb."""
        return (self.final or self.baseline or self.entries[0]).measurement

    @property
    def machine(self) -> RecordedMachine:
        return RecordedMachine.of(self.subject.machine)

    @property
    def milestones(self) -> tuple[Entry, ...]:
        """The timed plans among: original model, torch.compile, each kept rung, final plan."""
        steps = (self.baseline, self.compiled, *self.kept, self.final)
        return tuple(e for e in steps if e is not None and e.timed)

    @property
    def front(self) -> tuple[Point, ...]:
        """The Pareto front of speed, memory and quality."""
        return pareto_front([entry.measurement for entry in self.entries])

    @property
    def has_compiled(self) -> bool:
        """Whether a plan with torch.compile was measured."""
        return any(e.timed and "compile" in rung_names(e.row.plan) for e in self.entries)

    def _without_compile(self) -> str:
        return "" if self.has_compiled else "; torch.compile was not measured"

    def headline(self) -> str:
        """Returns, for example, `3.1× faster than eager, 1.4× faster than torch.compile, within all gates.`"""
        if self.baseline is None:
            return f"{_count(len(self.entries), 'measurement')}, no baseline to compare with."
        result = self.result
        if result is None:
            return "Only the baseline was measured: the climb stopped before a rung was kept."
        red = [score.metric.replace("_", " ") for score in result.measurement.scores if not score.passed]
        if red:
            return f"The final plan fails its gate on {' and '.join(red)}, so no speed is reported."
        if not result.timed:
            return f"The final plan was {result.row.verdict}: {result.row.reason.rstrip('.')}."
        if self.final is not None and result.row.verdict == "dropped":
            return f"{result.row.reason[0].upper()}{result.row.reason[1:]}."
        if self.final is not None and result.row.plan == self.baseline.row.plan:
            ran = _count(sum(e.row.verdict not in UNTRIED for e in self.tried), "trial")
            return f"No plan was better than the original model in {ran}{self._without_compile()}."
        faster = _MORE_REQUESTS if self.subject.callers else _FASTER
        speed = [_faster(result.row.over_start, "eager", faster)]
        speed += [_faster(self.over_compiled, "torch.compile", faster)] if self.over_compiled else []
        speed[0] = f"at the 99th percentile {speed[0]}" if self.subject.is_tail else speed[0]
        memory = _memory(self.baseline, result)
        clauses = memory + speed if self.subject.objective == "memory" else speed + memory
        clauses += ["within all gates"] if result.measurement.scores else []
        sentence = ", ".join(clauses)
        sentence += self._without_compile()
        if self.final is None:
            return f"Interrupted before the final measurement; best so far: {sentence}."
        return f"{sentence[0].upper()}{sentence[1:]}."


def _is_plain_compile(entry: Entry) -> bool:
    """Returns whether a trial measured plain `torch.compile` on the untouched model."""
    plan = entry.row.plan
    return entry.row.role in TRIED and (plan == "compile" or plan.startswith("compile(mode=")) and "," not in plan


def choose_run(measurements: Sequence[Measurement], run: str | None = None) -> list[Measurement]:
    """Returns the measurements of one climb: the latest, or the one whose id starts with `run`."""
    if not measurements:
        raise MeasurementError("the file contains no measurements to report.")
    ids = list(dict.fromkeys(m.run for m in measurements))
    run = measurements[-1].run if run is None else run
    matches = [run] if run in ids else [known for known in ids if known.startswith(run)]
    if len(matches) != 1:
        problem = "several runs in this file start with" if matches else "no run in this file starts with"
        raise MeasurementError(f"{problem} {run!r}: choose one of {', '.join(map(repr, ids))}.")
    return [m for m in measurements if m.run == matches[0]]


def find_final(rows: Sequence[Row]) -> int | None:
    """Returns the index of the final plan's row; other rows with role "final" are plans that it raced against."""
    finals = [index for index, row in enumerate(rows) if row.role == "final"]
    rivals = {row.plan for row in rows if row.role in ("baseline", "compile")}
    kept = [i for i in finals if rows[i].verdict == "kept"]
    if finals and rows[finals[-1]].verdict == "dropped":
        return finals[-1]  # even the best plan is above the memory limit
    return next(iter(kept or [i for i in finals if rows[i].plan not in rivals] or finals), None)


def row_label(row: Row, final: bool) -> str:
    if row.role == "baseline":
        return "eager"
    if row.role in TRIED:
        return row.rung or row.plan
    if row.role == "ablation":
        return f"without {row.rung}"
    if final:
        return "final plan"
    name = row.plan
    if row.plan.startswith("compile") and "+" not in row.plan:
        # Plain compile is shown as, for example, `torch.compile (max-autotune)`.
        options = row.plan.removeprefix("compile").strip("()").removeprefix("mode=")
        name = f"torch.compile ({options})" if options else "torch.compile"
    return f"{name}, in the final race" if row.role == "final" else name


def _over_compiled(entries: Sequence[Entry], final: Entry | None, compiled: Entry | None) -> float | None:
    """Returns the speed-up of the final plan over torch.compile, from samples of the final race if possible."""
    if final is None or compiled is None or final.row.over_start is None:
        return None
    if final.row.plan == compiled.row.plan:
        return 1.0
    raced = [e for e in entries if e.row.role == "final" and e.row.plan == compiled.row.plan and e.timed]
    if not raced:
        return final.row.over_start / compiled.row.over_start if compiled.row.over_start else None
    ours, theirs = final.measurement, raced[0].measurement
    pairs = [(theirs.samples[s], ours.samples[s]) for s in ours.shapes if s in theirs.samples]
    return ratio_interval(pairs, ours.is_tail).middle if pairs else None


def _faster(ratio: float | None, than: str, words: tuple[str, str, str] = _FASTER) -> str:
    if ratio is None:
        return f"not compared with {than}"
    same, more, fewer = words
    if abs(ratio - 1) < _SAME:
        return f"{same} {than}"
    return f"{format_ratio(ratio)} {more} {than}" if ratio > 1 else f"{format_ratio(1 / ratio)} {fewer} {than}"


def format_ratio(ratio: float) -> str:
    return f"{ratio:.2f}×" if ratio < 10 else f"{ratio:.3g}×"


def format_change(ratio: float) -> str:
    """Returns a ratio as a change: 0.59 as −41%."""
    return f"{ratio - 1:+.0%}".replace("-", "−")


def _memory(baseline: Entry, result: Entry) -> list[str]:
    before, after = baseline.row.peak_bytes, result.row.peak_bytes
    if not before or not after or abs(after / before - 1) < _SAME:
        return []
    return [f"{abs(after / before - 1):.0%} {'less' if after < before else 'more'} memory"]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def interleaved_eager_s(climb: Climb, shape: str | None = None) -> float | None:
    """Returns the time of the original model, if possible from the turns in which the result was timed.

    A ratio of two times that were measured far apart would include the drift of the machine.
    """
    result = climb.result
    if result is not None and result.timed:
        shape = result.measurement.shapes[0] if shape is None else shape
        if result.measurement.against_samples.get(shape):
            return result.measurement.against_s(shape)
        if result.measurement.plan == "eager":
            return result.measurement.time_s(shape)
    return climb.baseline.measurement.time_s(shape) if climb.baseline and climb.baseline.timed else None

"""The log of a run: creates the measurements, writes each to disk, and reuses those of a run that is resumed."""

import shlex
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from redline.files.atomic import write_text
from redline.ladder.measurement import Measurement, append, read_measurements
from redline.ladder.measuring.trial import Arm, TrialSpec
from redline.ladder.plan import Plan
from redline.ladder.search.preparation import WorkloadFacts
from redline.ladder.search.source_digest import describe_change
from redline.machine.machine import Machine
from redline.machine.version import VERSION
from redline.notation import format_bytes


class RunLog:
    """The measurements of a run, in memory and, if a path is given, in a file."""

    def __init__(self, spec: TrialSpec, machine: Machine, facts: WorkloadFacts, path: Path | None = None) -> None:
        self.spec = spec
        self.machine = machine
        self.facts = facts
        self.path = path
        self.run = uuid.uuid4().hex[:12]
        self.rows: list[Measurement] = []
        self._known: dict[tuple[str, str, str], Measurement] = {}

    def open(self, resume: bool) -> str:
        """Resumes the climb in the file, or renames the existing file, so that an earlier climb is never overwritten.

        Returns a sentence that says what is resumed; empty if `resume` is false.
        """
        if self.path is None or not self.path.exists():
            return "there is nothing to resume: starting anew" if resume else ""
        if not resume:
            aside = self.path.with_name(f"{self.path.stem}-{time.time_ns() // 1_000_000}{self.path.suffix}")
            self.path.rename(aside)
            return ""
        rows = read_measurements(self.path)
        for row in rows:
            if self._is_reusable(row):
                self._known[(row.role, row.rung, row.against)] = row
                self.run = row.run
        # Removes the rows that will be measured again: final race, failures, and trials that did not fit in the budget.
        kept = [row for row in rows if row.run != self.run or self._is_reusable(row)]
        write_text(self.path, "".join(row.to_json() + "\n" for row in kept))
        if self._known:
            count = len(self._known)
            return f"resuming: {count} earlier measurement{' is' if count == 1 else 's are'} used again"
        why = self._difference(rows[-1]) if rows else ""
        return f"there is nothing to resume{f', because {why}' if why else ''}: starting anew"

    def _is_reusable(self, row: Measurement) -> bool:
        # Failures are tried again, because a time limit may have been too short.
        again = row.role == "final" or row.verdict in ("unmeasured", "failed")
        return not again and not self._difference(row)

    def _difference(self, row: Measurement) -> str:
        """Returns why a row cannot be reused; empty if it can."""
        if row.machine.get("fingerprint") != self.machine.fingerprint:
            return f"it was measured on another machine ({row.machine.get('name')})"
        if row.workload != self.spec.label:
            return f"it belongs to another workload ({row.workload})"
        if row.objective != self.spec.objective:
            return f"its objective was {row.objective}"
        if row.callers != self.spec.callers:
            return f"it had {row.callers} concurrent callers"
        if row.max_bytes != self.spec.max_bytes:
            return f"its memory limit was {format_bytes(row.max_bytes) if row.max_bytes else 'not set'}"
        if row.options != {label: dict(options) for label, options in self.spec.shapes.items()}:
            return "its shapes were different"
        if row.redline != VERSION:
            return f"it was measured by Redline {row.redline or 'of an unknown version'}"
        if row.digest != self.facts.digest:
            return describe_change(row.sources, self.facts.sources) or "the gates or the reference have changed"
        return ""

    def knows(self, role: str, rung: str = "", against: str = "") -> bool:
        return (role, rung, against) in self._known

    def knows_plan(self, plan: str) -> bool:
        return any(row.plan == plan and row.samples for row in self._known.values())

    def recall(self, role: str, rung: str = "", against: str = "") -> Measurement | None:
        """Returns the row of this trial in the resumed climb, and adds it to this run; None if there is no such row."""
        row = self._known.get((role, rung, against))
        if row is not None:
            self.rows.append(row)
        return row

    def record(self, row: Measurement) -> Measurement:
        self.rows.append(row)
        if self.path is not None:
            append(self.path, row)
        return row

    def row(
        self,
        role: str,
        plan: Plan,
        verdict: str,
        reason: str,
        arm: Arm | None = None,
        samples: Mapping[str, Sequence[float]] | None = None,
        against_samples: Mapping[str, Sequence[float]] | None = None,
        notes: tuple[str, ...] = (),
        **values: Any,
    ) -> Measurement:
        """Creates a measurement from the worker's results; omits `samples` if a gate failed."""
        if arm is not None:
            names = ("setup_s", "warmups", "peak_bytes", "weight_bytes", "least_bytes", "precision", "scores", "proof")
            values |= {name: getattr(arm, name) for name in names} | {"setup_cached": arm.cached}
        return Measurement(
            workload=self.spec.label,
            plan=str(plan),
            role=role,
            verdict=verdict,
            reason=reason,
            machine=self.machine.as_dict(),
            samples={label: tuple(v) for label, v in (samples or {}).items()},
            against_samples={label: tuple(v) for label, v in (against_samples or {}).items()},
            notes=(*(arm.notes if arm is not None else ()), *notes, *([self.facts.state] if self.facts.state else [])),
            flops=self.facts.flops,
            items=self.facts.items,
            unit=self.facts.unit,
            training=self.facts.training,
            objective=self.spec.objective.value,
            callers=self.spec.callers,
            max_bytes=self.spec.max_bytes,
            options={label: dict(options) for label, options in self.spec.shapes.items()},
            digest=self.facts.digest,
            sources=self.facts.sources,
            run=self.run,
            command=command_line(sys.argv),
            redline=VERSION,
            **values,
        )


def plan_of(row: Measurement) -> Plan:
    return Plan.parse(row.plan)


def added_rungs(row: Measurement) -> Plan:
    """Returns the rungs that a trial added to the incumbent, as a plan."""
    return Plan.parse(row.rung)


def command_line(words: Sequence[str]) -> str:
    """Returns the command as the user typed it, without the names of this machine's folders."""
    program, *others = (Path(word).name if word.startswith("/") else word for word in words or ("-c",))
    is_redline = Path(program).stem in ("redline", "__main__", "-c")
    return shlex.join([*(["redline"] if is_redline else ["python", program]), *others])

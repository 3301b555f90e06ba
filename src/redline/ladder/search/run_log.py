"""The logbook of a run: makes its measurements, writes each to disk as it is made, and recalls those made before."""

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
from redline.ladder.search.source_digest import describe_change
from redline.machine.machine import Machine
from redline.version import VERSION


class RunLog:
    def __init__(self, spec: TrialSpec, machine: Machine, facts: Mapping[str, Any], path: Path | None = None) -> None:
        self.spec = spec
        self.machine = machine
        self.facts = facts
        self.path = path
        self.run = uuid.uuid4().hex[:12]
        self.rows: list[Measurement] = []
        self._known: dict[tuple[str, str, str], Measurement] = {}

    def open(self, resume: bool) -> str:
        """An earlier climb in the same file is gone on with, or moved aside; it is never overwritten.

        Says what comes of a wish to resume; empty when there was none.
        """
        if self.path is None or not self.path.exists():
            return "there is nothing to resume: starting afresh" if resume else ""
        if not resume:
            aside = self.path.with_name(f"{self.path.stem}-{time.time_ns() // 1_000_000}{self.path.suffix}")
            self.path.rename(aside)
            return ""
        rows = read_measurements(self.path)
        for row in rows:
            if self._is_ours(row):
                self._known[(row.role, row.rung, row.against)] = row
                self.run = row.run
        # What is measured again (a final race, what a budget left out, a line cut short) must not stand there twice.
        kept = [row for row in rows if row.run != self.run or self._is_ours(row)]
        write_text(self.path, "".join(row.to_json() + "\n" for row in kept))
        if self._known:
            count = len(self._known)
            return f"resuming: {count} earlier measurement{' is' if count == 1 else 's are'} used again"
        why = self._difference(rows[-1]) if rows else ""
        return f"there is nothing to resume{f', because {why}' if why else ''}: starting afresh"

    def _is_ours(self, row: Measurement) -> bool:
        # A failure may be a time limit that was too short: it is tried again.
        again = row.role == "final" or row.verdict in ("unmeasured", "failed")
        return not again and not self._difference(row)

    def _difference(self, row: Measurement) -> str:
        """Why a row cannot be used here, in words; empty when it can."""
        if row.machine.get("fingerprint") != self.machine.fingerprint:
            return f"it was measured on another machine ({row.machine.get('name')})"
        if row.workload != self.spec.address:
            return f"it is of another workload ({row.workload})"
        if row.objective != self.spec.objective:
            return f"its objective was {row.objective}"
        if row.options != {label: dict(options) for label, options in self.spec.shapes.items()}:
            return "its shapes were others"
        if row.redline != VERSION:
            return f"it was measured by Redline {row.redline or 'of an unknown version'}"
        if row.digest != self.facts["digest"]:
            return describe_change(row.sources, self.facts["sources"]) or "the gates or the reference have changed"
        return ""

    def knows(self, role: str, rung: str = "", against: str = "") -> bool:
        return (role, rung, against) in self._known

    def recall(self, role: str, rung: str = "", against: str = "") -> Measurement | None:
        """The row that an earlier part of this climb has made, now part of this one."""
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
        """A measurement; what the arm saw goes in, and times only where `samples` are given (never on a red gate)."""
        if arm is not None:
            values |= {
                "setup_s": arm.setup_s,
                "setup_cached": arm.cached,
                "warmups": arm.warmups,
                "peak_bytes": arm.peak_bytes,
                "weight_bytes": arm.weight_bytes,
                "least_bytes": arm.least_bytes,
                "precision": arm.precision,
                "scores": arm.scores,
                "proof": arm.proof,
            }
        return Measurement(
            workload=self.spec.address,
            plan=str(plan),
            role=role,
            verdict=verdict,
            reason=reason,
            machine=self.machine.as_dict(),
            samples={label: tuple(v) for label, v in (samples or {}).items()},
            against_samples={label: tuple(v) for label, v in (against_samples or {}).items()},
            notes=(*(arm.notes if arm is not None else ()), *notes),
            flops=self.facts["flops"],
            items=self.facts["items"],
            unit=self.facts["unit"],
            training=self.facts["training"],
            objective=self.spec.objective.value,
            options={label: dict(options) for label, options in self.spec.shapes.items()},
            digest=self.facts["digest"],
            sources=self.facts["sources"],
            run=self.run,
            command=command_line(sys.argv),
            redline=VERSION,
            **values,
        )


def command_line(words: Sequence[str]) -> str:
    """As it was typed, by whatever program, but for where things lie on this machine."""
    program, *others = (Path(word).name if word.startswith("/") else word for word in words)
    ours = Path(program).stem in ("redline", "__main__", "-c")
    return shlex.join([*(["redline"] if ours else ["python", program]), *others])

"""The logbook of a run: makes its measurements, writes each to disk as it is made, and recalls those made before."""

import shlex
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from redline.files import write_text
from redline.machine import Machine
from redline.measurement import Measurement, append, load_measurements
from redline.plan import Plan
from redline.trial import Arm, Course
from redline.version import VERSION


class Logbook:
    def __init__(self, course: Course, machine: Machine, facts: Mapping[str, Any], path: Path | None = None) -> None:
        self.course = course
        self.machine = machine
        self.facts = facts
        self.path = path
        self.run = uuid.uuid4().hex[:12]
        self.rows: list[Measurement] = []
        self._known: dict[tuple[str, str, str], Measurement] = {}

    def open(self, resume: bool) -> None:
        """An earlier climb in the same file is gone on with, or moved aside; it is never overwritten."""
        if self.path is None or not self.path.exists():
            return
        if not resume:
            aside = self.path.with_name(f"{self.path.stem}-{time.time_ns() // 1_000_000}{self.path.suffix}")
            self.path.rename(aside)
            return
        rows = load_measurements(self.path)
        for row in rows:
            if self._is_ours(row):
                self._known[(row.role, row.rung, row.against)] = row
                self.run = row.run
        # What is measured again (a final race, what a budget left out, a line cut short) must not stand there twice.
        kept = [row for row in rows if row.run != self.run or self._is_ours(row)]
        write_text(self.path, "".join(row.to_json() + "\n" for row in kept))

    def _is_ours(self, row: Measurement) -> bool:
        return (
            row.machine.get("fingerprint") == self.machine.fingerprint
            and row.workload == self.course.address
            and row.objective == self.course.objective
            and row.options == {label: dict(options) for label, options in self.course.shapes.items()}
            and row.digest == self.facts["digest"]
            and row.role != "final"
            # A failure may be a time limit that was too short: it is tried again.
            and row.verdict not in ("unmeasured", "failed")
        )

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
            workload=self.course.address,
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
            objective=self.course.objective,
            options={label: dict(options) for label, options in self.course.shapes.items()},
            digest=self.facts["digest"],
            run=self.run,
            command=shlex.join(["redline", *sys.argv[1:]]),
            redline=VERSION,
            **values,
        )

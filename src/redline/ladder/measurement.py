"""A measurement: the raw samples of one plan, from which statistics are derived. Files are versioned JSON lines."""

import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from redline.errors import MeasurementError
from redline.files.untrusted import check_types, explain, field_types, parse_json, read_text, reading
from redline.ladder.gate import Score
from redline.ladder.shape_ranges import SizeResult, describe_range
from redline.ladder.statistics import (
    Interval,
    median,
    median_interval,
    percentile_99,
    percentile_99_interval,
    ratio_interval,
)

SCHEMA = 1

# The decision about the plan.
VERDICTS = ("baseline", "kept", "dropped", "refused", "unavailable", "failed", "unmeasured")

# The types of the entries of `machine` that reports read; other entries are not checked.
_MACHINE: dict[str, Any] = {
    "name": str,
    "device": str,
    "fingerprint": str,
    "host_bytes": int,
    "device_bytes": int,
    "versions": Mapping[str, Any] | None,
    "ceilings": Mapping[str, Any] | None,
}
_CEILINGS: dict[str, Any] = {
    "bytes_per_s": float,
    "matmul_flops_per_s": Mapping[str, float],
    "convolution_flops_per_s": Mapping[str, float],
}
# The end of the year 9999, the last year that `datetime` supports.
_LATEST = 253_402_300_799


@dataclass(frozen=True)
class Measurement:
    """One plan on one workload on one machine, timed in turns with another plan."""

    workload: str
    plan: str
    # Why the measurement was made: baseline, compile, opening, trial, second look, ablation, final, verify or bench.
    role: str
    verdict: str
    reason: str
    machine: Mapping[str, Any]
    # The rung that this measurement is about ("" for a baseline).
    rung: str = ""
    # Seconds per step by input shape, one value per turn; "" is the default shape of the workload. For the objective
    # p99, the seconds of each call, with `CALLS_PER_TURN` calls per turn. For the objective requests, the seconds of
    # each turn divided by its number of requests.
    samples: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    # The plan that was timed in turns with this plan, and the samples of that plan from the same turns.
    against: str = ""
    against_samples: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    warmups: int = 0
    # Seconds until the first result, by shape: applying the plan, compiling, the first call.
    setup_s: Mapping[str, float] = field(default_factory=dict)
    # True if the set-up used a compiler's cache, and so took less time than on first use.
    setup_cached: bool = False
    peak_bytes: int = 0
    weight_bytes: int = 0
    # By shape: floating-point operations of one step, and the smallest number of bytes that the step must move.
    flops: Mapping[str, float] = field(default_factory=dict)
    least_bytes: Mapping[str, float] = field(default_factory=dict)
    precision: str = "fp32"
    scores: tuple[Score, ...] = ()
    proof: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    items: Mapping[str, float] = field(default_factory=dict)
    unit: str = "call"
    objective: str = "latency"
    # The concurrent callers of the objective requests, else 0; and the memory limit of the climb, 0 if it has none.
    callers: int = 0
    max_bytes: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    training: bool = False
    created: float = field(default_factory=time.time)
    # A digest of the workload's source file, gates, FLOPs and reference dtype; it identifies the workload.
    digest: str = ""
    # A digest of each source file by name, to report what changed.
    sources: Mapping[str, str] = field(default_factory=dict)
    # The id of the climb; a file may hold several climbs.
    run: str = ""
    command: str = ""
    redline: str = ""
    schema: int = SCHEMA
    # The cores that other processes used during the timing, and preemptions of the timed processes per second.
    load: Mapping[str, float] = field(default_factory=dict)
    # What the plan did at each size of a range of shapes, by the label of the range (only in the winner's row).
    ranges: Mapping[str, tuple[SizeResult, ...]] = field(default_factory=dict)
    # The number of sizes of each range, of which only a part may have been tried.
    range_counts: Mapping[str, int] = field(default_factory=dict)

    @property
    def shapes(self) -> tuple[str, ...]:
        return tuple(self.samples)

    def median_s(self, shape: str | None = None) -> float:
        values = self.samples.get(self.shapes[0] if shape is None else shape) if self.samples else None
        return median(values) if values else float("nan")

    def interval_s(self, shape: str | None = None) -> Interval:
        return median_interval(self.samples[self.shapes[0] if shape is None else shape])

    @property
    def is_tail(self) -> bool:
        """Whether the samples are single calls, of which the 99th percentile counts."""
        return self.objective == "p99"

    @property
    def statistic(self) -> str:
        return "p99" if self.is_tail else "median"

    def time_s(self, shape: str | None = None) -> float:
        """Returns the time that the objective is about: the 99th percentile for p99, else the median."""
        if not self.is_tail:
            return self.median_s(shape)
        values = self.samples.get(self.shapes[0] if shape is None else shape) if self.samples else None
        return percentile_99(values) if values else float("nan")

    def time_interval_s(self, shape: str | None = None) -> Interval:
        values = self.samples[self.shapes[0] if shape is None else shape]
        return percentile_99_interval(values) if self.is_tail else median_interval(values)

    def against_s(self, shape: str | None = None) -> float:
        """Returns the time of the plan that was timed in turns with this plan, like `time_s`."""
        values = self.against_samples.get(self.shapes[0] if shape is None else shape)
        return (percentile_99 if self.is_tail else median)(values) if values else float("nan")

    def speedup(self) -> Interval | None:
        """Returns the speed-up over the plan that was timed in turns with this plan (geometric mean over shapes)."""
        pairs = [(self.against_samples[s], self.samples[s]) for s in self.shapes if self.against_samples.get(s)]
        return ratio_interval(pairs, self.is_tail) if pairs else None

    @property
    def range_sentences(self) -> tuple[str, ...]:
        """A sentence for each range of shapes, which says where the plan sets up again, falls back or fails."""
        ranges = self.ranges.items()
        return tuple(describe_range(label, found, self.range_counts.get(label, len(found))) for label, found in ranges)

    @property
    def passed(self) -> bool:
        return bool(self.scores) and all(score.passed for score in self.scores)

    def throughput(self, shape: str | None = None) -> float:
        """Returns the items per second."""
        key = self.shapes[0] if shape is None else shape
        return self.items.get(key, 1.0) / self.median_s(key)

    def requests_per_s(self, shape: str | None = None) -> float:
        """Returns the calls per second of all callers together, for the objective requests."""
        return 1 / self.median_s(shape)

    def to_json(self) -> str:
        """Returns one line of JSON. NaN scores become null, because JSON has no NaN."""
        data = asdict(self)
        for score in data["scores"]:
            score["value"] = score["value"] if math.isfinite(score["value"]) else None
        return json.dumps(data, ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], origin: str = "measurement") -> "Measurement":
        schema = data.get("schema")
        if not isinstance(schema, int):
            raise MeasurementError(f"{origin} is not a measurement: it has no integer `schema`.")
        if schema > SCHEMA:
            raise MeasurementError(
                f"{origin} has schema {schema}, but this Redline reads up to {SCHEMA}: upgrade Redline."
            )
        known = field_types(cls)
        unknown = [key for key in data if key not in known]
        if unknown:
            raise MeasurementError(f"{origin} has an unknown field {unknown[0]!r} for schema {SCHEMA}.")
        _check_content(data, known, origin)
        try:
            values = dict(data)
            values["scores"] = tuple(
                Score(**(score | {"value": math.nan if score["value"] is None else score["value"]}))
                for score in data.get("scores", ())
            )
            for key in ("samples", "against_samples"):
                values[key] = {shape: tuple(map(float, v)) for shape, v in data.get(key, {}).items()}
            values["ranges"] = {
                label: tuple(SizeResult(**one) for one in found) for label, found in data.get("ranges", {}).items()
            }
            values["notes"] = tuple(data.get("notes", ()))
            return cls(**values)
        except (TypeError, KeyError) as error:
            raise MeasurementError(f"{origin} is damaged: {explain(error)}.") from error


def _check_content(data: Mapping[str, Any], known: Mapping[str, Any], origin: str) -> None:
    nested = {"scores": tuple[Mapping[str, Any], ...], "ranges": Mapping[str, tuple[Mapping[str, Any], ...]]}
    check_types(data, {**known, **nested}, origin, MeasurementError)
    for size in (size for sizes in data.get("ranges", {}).values() for size in sizes):
        check_types(size, field_types(SizeResult), origin, MeasurementError)
    for score in data.get("scores", ()):
        # NaN is written as null.
        check_types(score, {**field_types(Score), "value": float | None}, origin, MeasurementError)
    machine = data.get("machine", {})
    check_types(machine, _MACHINE, f"{origin} the machine", MeasurementError)
    check_types(machine.get("ceilings") or {}, _CEILINGS, f"{origin} the machine's ceilings", MeasurementError)
    if not 0 <= data.get("created", 0) <= _LATEST:
        raise MeasurementError(f"{origin} is damaged: 'created' is {data['created']}, not seconds since 1970.")
    for name in ("samples", "against_samples"):
        if any(min(samples, default=1) <= 0 for samples in data.get(name, {}).values()):
            raise MeasurementError(f"{origin} is damaged: {name!r} has a time that is not positive.")


def append(path: Path, measurement: Measurement) -> None:
    """Appends one line and waits until it is on disk."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(measurement.to_json() + "\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise MeasurementError(f"cannot write the measurements {str(path)!r}: {error.strerror or error}.") from error


def load_measurements(path: str | os.PathLike[str]) -> list[Measurement]:
    found = read_measurements(path)
    if not found:
        raise MeasurementError(f"{str(path)!r} has no measurements.")
    return found


def read_measurements(path: str | os.PathLike[str]) -> list[Measurement]:
    """Reads all measurements; there are none if a climb was killed before its first one."""
    with reading(path, "measurement file", MeasurementError):
        text = read_text(path)
    return list(_parse(text, str(path)))


def _parse(text: str, origin: str) -> Iterator[Measurement]:
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        place = f"{origin!r}, line {number},"
        try:
            data = parse_json(line, place, MeasurementError)
        except MeasurementError:
            if number == len(lines) and not text.endswith("\n"):
                return  # the climb was killed while it wrote this line
            raise
        if not isinstance(data, dict):
            raise MeasurementError(f"{place} is not a measurement.")
        yield Measurement.from_dict(data, place)


def latest_run(measurements: Sequence[Measurement]) -> list[Measurement]:
    """Returns the measurements of the last climb in a file."""
    return [m for m in measurements if m.run == measurements[-1].run]

"""Comparing two runs: other differences than speed are refused or noted."""

from dataclasses import replace

import pytest

from redline.errors import MachineError, MeasurementError
from redline.ladder.bench import BenchRun, Change
from redline.ladder.measurement import Measurement

THEN = Measurement(
    "mine.py:f",
    "eager",
    "bench",
    "baseline",
    "measured",
    {"fingerprint": "one", "device": "cpu", "name": "here"},
    samples={"": (0.100, 0.101, 0.102, 0.103)},
    peak_bytes=2**20,
    digest="d1",
    sources={"mine.py": "1", "net.py": "1"},
)


def compare(then: list[Measurement], now: list[Measurement], **options: bool) -> list[Change]:
    return BenchRun(tuple(now)).compare(BenchRun(tuple(then)), **options)


def test_the_same() -> None:
    (change,) = compare([THEN], [THEN])
    assert (change.verdict, change.note) == ("same", "")


def test_different_objectives_are_refused_even_with_any_machine() -> None:
    with pytest.raises(MeasurementError, match=r"different objectives \(latency and throughput\)"):
        compare([THEN], [replace(THEN, objective="throughput")], any_machine=True)
    with pytest.raises(MachineError, match="different machines"):
        compare([THEN], [replace(THEN, machine={"fingerprint": "two", "name": "there"})])


def test_changed_workload_adds_a_note() -> None:
    (change,) = compare([THEN], [replace(THEN, digest="d2", sources={"mine.py": "1", "net.py": "2"})])
    assert (change.verdict, change.note) == ("same", "the workload has changed: net.py has changed")
    (change,) = compare([THEN], [replace(THEN, digest="d2")])
    assert change.note == "the workload has changed: its gates, FLOPs or reference dtype"


def test_the_verdict_is_that_of_the_objective() -> None:
    slower_and_smaller = {"samples": {"": (0.2, 0.201, 0.202, 0.203)}, "peak_bytes": 2**19}
    for objective, verdict in (("latency", "slower"), ("memory", "smaller")):
        then = replace(THEN, objective=objective)
        (change,) = compare([then], [replace(then, **slower_and_smaller)])
        assert change.verdict == verdict

"""Resuming: which measurements are reused, and the reason if they are not."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from redline.ladder.measurement import load_measurements
from redline.ladder.measuring.trial import TrialSpec
from redline.ladder.objective import Objective
from redline.ladder.plan import Plan
from redline.ladder.search.preparation import WorkloadFacts
from redline.ladder.search.run_log import RunLog, command_line
from redline.machine.machine import Machine

MACHINE = Machine.detect("cpu")
SPEC = TrialSpec("mine.py:f", {"": {}}, "cpu", {})
FACTS = WorkloadFacts(
    name="f",
    training=False,
    unit="call",
    items={"": 1.0},
    flops={},
    operations=3,
    digest="d1",
    sources={"mine.py": "1", "net.py": "1"},
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A baseline and a failed trial, as an interrupted climb leaves them."""
    log = RunLog(SPEC, MACHINE, FACTS, tmp_path / "measurements.jsonl")
    assert log.open(resume=False) == ""
    log.record(log.row("baseline", Plan(), "baseline", "as it is", samples={"": [0.1, 0.2]}))
    log.record(log.row("trial", Plan.parse("bf16"), "failed", "it hung", rung="bf16", against="eager"))
    return tmp_path / "measurements.jsonl"


def resume(path: Path, spec: TrialSpec = SPEC, machine: Machine = MACHINE, **facts: Any) -> tuple[str, bool]:
    log = RunLog(spec, machine, replace(FACTS, **facts), path)
    return log.open(resume=True), log.recall("baseline") is not None


def test_measured_rows_are_reused_and_failures_are_not(path: Path) -> None:
    assert resume(path) == ("resuming: 1 earlier measurement is used again", True)
    assert [row.role for row in load_measurements(path)] == ["baseline"]


def test_a_change_in_an_imported_module_is_named(path: Path) -> None:
    said, used = resume(path, digest="d2", sources={"mine.py": "1", "net.py": "2"})
    assert said == "there is nothing to resume, because net.py has changed: starting anew" and not used
    assert len(load_measurements(path)) == 2, "what was measured is kept all the same"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"spec": replace(SPEC, objective=Objective.MEMORY)}, "its objective was latency"),
        ({"spec": replace(SPEC, callers=4)}, "it had 0 concurrent callers"),
        ({"spec": replace(SPEC, max_bytes=2**30)}, "its memory limit was not set"),
        ({"spec": replace(SPEC, address="other.py:f")}, "it belongs to another workload (mine.py:f)"),
        ({"spec": replace(SPEC, shapes={"batch=2": {"batch": 2}})}, "its shapes were different"),
        ({"machine": replace(MACHINE, cores=MACHINE.cores + 1)}, "it was measured on another machine"),
        ({"digest": "d2"}, "the gates or the reference have changed"),
    ],
)
def test_why_nothing_is_resumed(path: Path, change: dict[str, Any], why: str) -> None:
    said, used = resume(path, **change)
    assert f"nothing to resume, because {why}" in said and not used


def test_another_version_of_redline(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("redline.ladder.search.run_log.VERSION", "99.0")
    assert "because it was measured by Redline " in resume(path)[0]


@pytest.mark.parametrize("text", [None, "", '{"schema": 1, "work'])
def test_nothing_to_resume_starts_anew(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "measurements.jsonl"
    if text is not None:
        path.write_text(text)
    assert resume(path) == ("there is nothing to resume: starting anew", False)
    assert not path.exists() or path.read_text() == ""


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["/venv/bin/redline", "climb", "vit", "--out", "/tmp/o/vit"], "redline climb vit --out vit"),
        (["/src/redline/__main__.py", "bench"], "redline bench"),
        (["benchmarks/climb_all.py", "vit"], "python benchmarks/climb_all.py vit"),
        (["/home/me/run.py", "a b"], "python run.py 'a b'"),
    ],
)
def test_command_line_has_no_folders_of_the_machine(words: list[str], command: str) -> None:
    assert command_line(words) == command

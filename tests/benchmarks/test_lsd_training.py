"""The benchmark of training a live model: every stage with and without recomputing, and failures as rows."""

import json
from pathlib import Path
from types import ModuleType

import pytest

from benchmark_scripts import load_script


@pytest.fixture(scope="module")
def training() -> ModuleType:
    return load_script("lsd_training")


@pytest.mark.slow
def test_every_stage_is_measured(training: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "STEPS", 5)
    out = tmp_path / "rows.jsonl"
    assert training.main(["--out", str(out), "--tiny", "--size", "tiny", "--frame-px", "16"]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    stages = [(row["stage"], row["checkpointing"], row["has_teacher"]) for row in rows]
    ways = [("diffusion", False), ("rollouts", False), ("distillation", True)]
    assert stages == [(stage, recompute, teacher) for stage, teacher in ways for recompute in (True, False)]
    assert all(row["step_ms"] > 0 and row["parameters"] > 1000 for row in rows)


def test_an_arm_that_fails_is_a_row(training: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    assert training.main(["--out", str(out), "--tiny", "--size", "tiny", "--frame-px", "15"]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 6 and all("must be a multiple of 4" in row["failure"] for row in rows)

"""benchmarks/drct_training.py runs as a toy, and an arm that fails or is off is a row that says so."""

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from benchmark_scripts import load_script

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "drct_training.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("drct_training")


def run(script: ModuleType, monkeypatch: pytest.MonkeyPatch, out: Path, *arguments: str) -> dict[str, dict[str, Any]]:
    usual = ["drct_training.py", "--tiny", "--out", str(out), "--rounds", "2", "--steps", "1"]
    monkeypatch.setattr(sys, "argv", [*usual, *arguments])
    assert script.main() == 0
    return {row["arm"]: row for row in map(json.loads, out.read_text().splitlines())}


@pytest.mark.slow
def test_every_arm_is_a_row(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = run(script, monkeypatch, tmp_path / "rows.jsonl", "--only", "eager", "--profile")
    assert list(rows) == ["eager, reference", "eager, sdpa", "eager, triton", "eager, triton, recorded"]
    for name in ("eager, reference", "eager, sdpa"):
        row = rows[name]
        assert row["ms_per_step"] > 0 and row["images_per_s"] > 0 and len(row["ms_per_step_samples"]) == 2
        assert row["cpu_ms_per_step"] > 0 and row["relative_error"] < 1e-4 and "failure" not in row
        assert len(row["kernels"]) == 25 and row["kernels_per_step"] > 100
    assert rows["eager, triton"]["failure"].startswith("MachineError: ") and "ms_per_step" not in rows["eager, triton"]
    said = capsys.readouterr().out
    assert "eager, sdpa: " in said and "images/s" in said and "cannot run" in said


@pytest.mark.parametrize(("bias", "output"), [(1.5, 1.0), (1.0, 1.2)])
def test_an_arm_that_is_off_gets_no_time(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bias: float, output: float
) -> None:
    from redline.ops.window_attention import sdpa

    right = sdpa.window_attention

    def wrong(qkv: torch.Tensor, table: torch.Tensor, *sizes: int) -> torch.Tensor:
        return right(qkv, bias * table, *sizes) * output

    monkeypatch.setattr(sdpa, "window_attention", wrong)
    rows = run(script, monkeypatch, tmp_path / "rows.jsonl", "--only", "eager, sdpa")
    assert rows["eager, sdpa"]["failure"].startswith("ArithmeticError: off by")
    assert "ms_per_step" not in rows["eager, sdpa"] and rows["eager, reference"]["ms_per_step"] > 0


def test_a_gpu_that_is_not_there_is_said(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["drct_training.py", "--out", str(tmp_path / "rows.jsonl")])
    assert script.main() == 2 and "needs a CUDA device" in capsys.readouterr().err


def as_a_program(out: Path, *arguments: str) -> dict[str, dict[str, Any]]:
    words = [sys.executable, str(SCRIPT), "--out", str(out), *arguments]
    subprocess.run(words, check=True, timeout=180, stdout=subprocess.DEVNULL)
    return {row["arm"]: row for row in map(json.loads, out.read_text().splitlines())}


@pytest.mark.slow
def test_arms_in_processes_of_their_own(tmp_path: Path) -> None:
    rows = as_a_program(tmp_path / "rows.jsonl", "--tiny", "--processes", "--only", "eager", "--steps", "1")
    assert rows["eager, sdpa"]["ms_per_step"] > 0 and rows["eager, reference"]["ms_per_step"] > 0
    assert rows["eager, triton"]["failure"].startswith("MachineError: window_attention: the Triton kernels cannot run")
    late = as_a_program(tmp_path / "late.jsonl", "--tiny", "--processes", "--only", "sdpa", "--limit", "0.1")
    assert all(row["failure"] == "not ready after 0 s" for row in late.values())


@pytest.mark.gpu
def test_on_a_gpu_the_kernels_are_an_arm(tmp_path: Path) -> None:
    rows = as_a_program(tmp_path / "rows.jsonl", "--only", "eager, triton", "--steps", "3", "--profile")
    row = rows["eager, triton"]
    assert row["ms_per_step"] > 0 and row["peak_bytes"] > 0 and "failure" not in row
    assert any("forward_kernel" in kernel["name"] or kernel["ms"] > 0 for kernel in row["kernels"])
